"""Everything that calibration calls by an operator's own name runs on a GPU too: by a list made with a CUDA build of torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsim.errors import ConfigError
from tools.cuda_operators import LIST_PATH, cuda_kernels, list_text, without_cuda_kernel

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from calibration.measure.operators import VISITS, Pool
from parsim.model.build import build_module, example_batch
from parsim.model.spec import ModelSpec

ROOT = Path(__file__).parents[2]
PACKAGES = ("calibration", "parsim/execute")
CUDA_BUILD = torch.version.cuda is not None
NEEDS_CUDA_BUILD = pytest.mark.skipif(
    not CUDA_BUILD, reason=f"torch {torch.__version__} was built without CUDA, and knows no tensors there, not even fake ones"
)


def named_operators(tree: ast.AST) -> Iterator[str]:
    """x of every `aten.x` and `torch.ops.aten.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", getattr(node.value, "attr", "")) == "aten":
            yield node.attr


def test_every_operator_called_by_name_has_a_kernel_on_gpus() -> None:
    called = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in named_operators(ast.parse(path.read_text()))
    }
    assert {"convolution_backward", "native_layer_norm", "nll_loss_backward"} <= called, "the search finds them"
    assert without_cuda_kernel(called) == ()


def test_the_list_tells_apart_what_runs_where() -> None:
    known = cuda_kernels()
    assert known["mm"] == "CUDA"
    assert known["convolution_backward"] == "CUDA"
    assert known["embedding"].startswith("CompositeExplicit")
    assert known["scaled_dot_product_attention"] == "CompositeImplicitAutograd"
    for_cpu = "_scaled_dot_product_flash_attention_for_cpu"
    assert without_cuda_kernel(["mm", for_cpu, f"{for_cpu}_backward"]) == (for_cpu, f"{for_cpu}_backward")
    assert LIST_PATH.read_text().startswith("# torch 2.")


@pytest.mark.skipif(CUDA_BUILD, reason="this build can make the list")
def test_a_cpu_build_cannot_make_the_list() -> None:
    with pytest.raises(ConfigError, match="built without CUDA"):
        list_text()


# --- on a CUDA build, with or without a GPU ---------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The operators that reach a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "aten":  # prim::device and its like launch nothing
            self.names.add(name)
        return function(*args, **(kwargs or {}))


SMALL = {
    "matmul": {"problems": 2, "rows": 8, "columns": 8, "depth": 8},
    "convolution": {"images": 2, "inputs": 4, "outputs": 4, "groups": 1, "taps": 9, "pixels_in": 64, "pixels_out": 64},
    "attention": {"problems": 4, "queries": 16, "keys": 16, "depth": 16},
    "embedding": {"rows": 8, "width": 16},
    "memory_bound": {"elements": 256, "width": 16},
}
KINDS = {"linear": "matmul", "batched": "matmul", "plain": "attention", "causal": "attention", "gather": "embedding"}
CONVOLUTIONS = ("pointwise", "3x3", "grouped", "other")
DECIDED_BY_AUTOGRAD = ("plain", "causal", "batch_norm")
"""Their backward runs in autograd's engine, which asks for a real device."""


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("function", VISITS)
def test_every_timed_call_runs_on_fake_tensors_of_a_gpu(function: str) -> None:
    kind = KINDS.get(function, "convolution" if function in CONVOLUTIONS else "memory_bound")
    phases = ("forward",) if function in DECIDED_BY_AUTOGRAD else ("forward", "backward", "backward_input", "backward_weight")
    with FakeTensorMode():
        pool = Pool(torch.float32, torch.device("cuda:0"), 0)
        for phase in phases:
            with Recorder() as seen, torch.no_grad():
                VISITS[function](SMALL[kind], phase, pool)()
                pool.rewriting()()
            assert without_cuda_kernel(seen.names) == ()


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "gpt", "bert", "mlp"])
def test_the_zoo_runs_forward_on_fake_tensors_of_a_gpu(name: str) -> None:
    spec = ModelSpec(name=name)
    module = build_module(spec)  # for real: `trunc_normal_` of torch 2.13 looks at what it drew
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    with FakeTensorMode():
        state = {key: torch.empty(value.shape, dtype=value.dtype, device="cuda:0") for key, value in held.items()}
        inputs, _ = example_batch(spec, 2, device="cuda:0")
        with Recorder() as seen:
            output = functional_call(module, state, kwargs=inputs)
    assert output.device.type == "cuda"
    assert without_cuda_kernel(seen.names) == ()


# The list of what was fixed for GPUs names tests that exist.

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_test_of_the_list_exists() -> None:
    text = (REPOSITORY / "docs" / "gpu.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| fixed", "| fault"))]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test stands beside: {row}"
        for path, name in named:
            assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{path} has no {name}"
