"""The table of operators against torch's flop counter, over torch's operator database; bytes and growth of every operator."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("expecttest", reason="torch's operator database needs it (the dev extra)")

import torch
import torch.nn.functional as F
from torch import randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from parsim.model.operator_table import TABLE, UNLISTED, row_of
from parsim.model.trace.operators import OperatorMode, RawOperator
from parsim.model.trace.recorder import tensors_in


def operator_database() -> list[Any]:
    """torch's list of operators. Importing it freezes the switches of torch.backends, which other tests set: they are freed."""
    was_frozen = torch.backends.flags_frozen()
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = not was_frozen
    assert torch.backends.flags_frozen() == was_frozen
    return list(op_db)


op_db = operator_database()
Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]
LEFT_OUT = ("sparse", "jiterator")
"""Of tensors that are not dense, and for GPUs alone."""

DATABASE = [op for op in op_db if torch.float32 in op.dtypes and not any(part in op.name for part in LEFT_OUT)]
FEW = DATABASE[::15]


def samples(op: Any, count: int) -> Iterator[Sample]:
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), count):
        yield sample.input, tuple(sample.args), dict(sample.kwargs)


def operators(op: Any, sample: Sample) -> list[RawOperator]:
    given, args, kwargs = sample
    with torch.no_grad(), OperatorMode(lambda: 0, set()) as mode:
        op(given, *args, **kwargs)
    return mode.operators


def total(found: list[RawOperator], name: str) -> int:
    return sum(raw.count * getattr(raw, name) for raw in found)


def shape_flop(raw: RawOperator) -> int:
    """2 m n k of a product, and what stands for it in a convolution and in attention."""
    size = dict(raw.shape)
    if raw.kind == "matmul":
        return 2 * size["m"] * size["n"] * size["k"] * size.get("problems", 1)
    if raw.kind == "convolution":
        per_output = size["c"] * size["r"] * size["s"] // size["groups"]
        return 2 * size["batch"] * size["k"] * size["out_h"] * size["out_w"] * per_output
    return 4 * size["batch"] * size["heads"] * size["q"] * size["kv"] * size["d"]


class Bytes(TorchDispatchMode):
    """Bytes of the tensors that calls read and write once each, of those that are no views and touch all they read."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        row, name = row_of(str(func._overloadpacket)), str(func._overloadpacket)
        made = {id(tensor): tensor for _, tensor in tensors_in(out)}
        reads = {id(tensor): tensor for _, tensor in tensors_in((args, kwargs or {}))}
        part = row is not None and (row.reads_part or "embedding" in name)
        view = any(value.alias_info is not None for value in func._schema.returns) and not func._schema.is_mutable
        if not part and not view and made and "empty" not in name and name not in ("aten.detach", "aten.lift_fresh"):
            storages = {tensor.untyped_storage()._cdata for tensor in reads.values()}
            if reads and not func._schema.is_mutable and all(t.untyped_storage()._cdata in storages for t in made.values()):
                return out
            if row is None or row.pieces is None or "rnn" not in name:
                every = [*reads.values(), *made.values()]
                self.size_bytes += sum(
                    min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in every
                )
        return out


def check(op: Any, count: int) -> int:
    """Compare `count` samples with the counter; returns how many were compared."""
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples(op, count):
            found = operators(op, sample)
            given, args, kwargs = sample
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                op(given, *args, **kwargs)
            with torch.no_grad(), Bytes() as size:
                op(given, *args, **kwargs)
            counted = [
                raw for raw in found if getattr(torch.ops.aten, raw.function.removeprefix("aten."), None) in flop_registry
            ]
            assert total(counted, "flop") == counter.get_total_flops(), op.name
            for raw in found:
                assert raw.flop >= 0
                if raw.kind in ("matmul", "attention") or (raw.kind == "convolution" and "transpose" not in op.name):
                    assert shape_flop(raw) == raw.flop, (op.name, raw)
            assert total(found, "activation_bytes") + total(found, "parameter_bytes") >= size.size_bytes, op.name
            compared += 1
    return compared


@pytest.mark.parametrize("op", FEW, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_a_part_of_the_database_agrees_with_torchs_counter(op: Any) -> None:
    assert check(op, 2)


@pytest.mark.slow
@pytest.mark.parametrize("op", DATABASE, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_the_database_agrees_with_torchs_counter(op: Any) -> None:
    assert check(op, 12)


def repeated(sample: Sample, times: int) -> Sample | None:
    """The same call on so many times the batch, contiguous; None where the input has no batch."""
    given, args, kwargs = sample
    if not isinstance(given, torch.Tensor) or given.dim() == 0 or given.numel() == 0:
        return None
    return torch.cat([given] * times), args, kwargs


@pytest.mark.parametrize("op", FEW, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_more_samples_never_compute_or_move_less(op: Any) -> None:
    for sample in samples(op, 3):
        smaller, larger = repeated(sample, 1), repeated(sample, 2)
        if smaller is None or larger is None:
            continue
        try:
            before, after = operators(op, smaller), operators(op, larger)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            continue  # the other arguments belong to the sample as it was
        for name in ("flop", "activation_bytes"):
            assert total(after, name) >= total(before, name), (op.name, name)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(5))
def test_the_table_lacks_no_operator_of_the_database(place: int) -> None:
    """A new one in torch is found by this test, and users see its name. A fifth of the database each."""
    lacking: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in DATABASE[place::5]:
            for sample in samples(op, 1):
                lacking |= {raw.function for raw in operators(op, sample) if raw.function.startswith(UNLISTED)}
    assert lacking == set()


BESIDE_THE_DATABASE = {
    "far distances": lambda: torch.cdist(torch.randn(2, 30, 4), torch.randn(2, 40, 4)),
    "windows": lambda: torch.stft(torch.randn(2, 64), 16, window=torch.hann_window(16), return_complex=True),
    "fake quantisation": lambda: torch.fake_quantize_per_tensor_affine(torch.randn(4), 0.1, 0, -128, 127),
    "leaky activations, which torch 2.11 does not tag": lambda: F.leaky_relu(torch.randn(4)),
    "rows of bounded norm": lambda: F.embedding(torch.zeros(3, dtype=torch.long), torch.randn(5, 4), max_norm=1.0),
}


@pytest.mark.parametrize("name", BESIDE_THE_DATABASE)
def test_calls_that_the_database_does_not_make_are_listed(name: str) -> None:
    with torch.no_grad(), OperatorMode(lambda: 0, set()) as mode:
        BESIDE_THE_DATABASE[name]()
    assert [raw.function for raw in mode.operators if raw.function.startswith(UNLISTED)] == []
    if name == "far distances":
        assert total(mode.operators, "flop") >= 2 * 2 * 30 * 40 * 4


SIZED: dict[str, Callable[[int, int, int, int], Any]] = {
    "linear": lambda b, m, n, k: F.linear(randn(b, m, k), randn(n, k)),
    "bmm": lambda b, m, n, k: torch.bmm(randn(b, m, k), randn(b, k, n)),
    "einsum": lambda b, m, n, k: torch.einsum("bmk,kn->bnm", randn(b, m, k), randn(k, n)),
    "convolution": lambda b, m, n, k: F.conv2d(randn(b, 2 * k, m + 3, m + 3), randn(2 * n, k, 3, 3), groups=2),
    "transposed convolution": lambda b, m, n, k: F.conv_transpose2d(randn(b, k, m, m), randn(k, n, 2, 2), stride=2),
    "attention": lambda b, m, n, k: F.scaled_dot_product_attention(randn(b, k, m, 8), randn(b, k, n, 8), randn(b, k, n, 8)),
    "lstm": lambda b, m, n, k: torch.nn.LSTM(k, n, batch_first=True)(randn(b, m, k)),
    "gru": lambda b, m, n, k: torch.nn.GRU(k, n, batch_first=True)(randn(b, m, k)),
    "bilinear": lambda b, m, n, k: F.bilinear(randn(b, m), randn(b, k), randn(n, m, k)),
    "fft": lambda b, m, n, k: torch.fft.fft(randn(b, m, k, dtype=torch.complex64), dim=1),
    "distances": lambda b, m, n, k: torch.cdist(randn(b, m, k), randn(b, n, k)),
    "solve": lambda b, m, n, k: torch.linalg.solve(randn(b, m, m), randn(b, m, n)),
    "singular values": lambda b, m, n, k: torch.linalg.svd(randn(b, m, n), full_matrices=False),
    "sort": lambda b, m, n, k: randn(b, m, k).sort(-1),
    "scatter": lambda b, m, n, k: torch.zeros(b, m).scatter_add(1, torch.zeros(b, n, dtype=torch.long), randn(b, n)),
    "index_add": lambda b, m, n, k: torch.zeros(m, k).index_add(0, torch.zeros(n, dtype=torch.long), randn(n, k)),
    "bag": lambda b, m, n, k: F.embedding_bag(torch.zeros(b, m, dtype=torch.long), randn(k, n)),
}


def recorded(name: str, sizes: dict[str, int]) -> tuple[int, int]:
    """Flop and bytes of a call on fresh tensors."""
    with torch.no_grad(), OperatorMode(lambda: 0, set()) as mode:
        SIZED[name](**sizes)
    kept = [raw for raw in mode.operators if raw.function not in ("aten.randn", "aten.zeros", "aten.uniform_")]
    return total(kept, "flop"), total(kept, "activation_bytes")


@pytest.mark.parametrize("name", SIZED)
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.fixed_dictionaries({size: st.integers(1, 6) for size in "bmnk"}),
    grown=st.sampled_from("bmnk"),
    more=st.integers(1, 4),
)
def test_flop_and_bytes_grow_with_every_size(name: str, sizes: dict[str, int], grown: str, more: int) -> None:
    before, after = recorded(name, sizes), recorded(name, {**sizes, grown: sizes[grown] + more})
    assert after[0] >= before[0]
    assert after[1] >= before[1]


@pytest.mark.parametrize("name", [name for name in SIZED if name not in ("sort", "scatter", "index_add", "bag")])
def test_arithmetic_is_counted(name: str) -> None:
    assert recorded(name, {"b": 2, "m": 4, "n": 3, "k": 5})[0] > 0


def test_rows_have_no_two_meanings() -> None:
    for name, row in TABLE.items():
        assert row.pieces is None or row.flop is None, name
        assert name.partition(".")[2], name
