"""Names of other packages that are not public: all imports of them stand in parsim/private.py, and a release that moves one is
named, with what it moved."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ROOT / "parsim" / "private.py"
ATTRIBUTES = {
    "torch": ("Tensor._version", "Tensor._make_subclass", "UntypedStorage._cdata", "nn.Module._apply"),
    "torch._C": (
        *("_set_warn_deprecated_on_mutable_data_ptr", "_set_throw_on_mutable_data_ptr"),
        *("_distributed_c10d._create_work_from_future", "_distributed_c10d.AllgatherOptions"),
        *("_distributed_c10d.AllreduceOptions", "_distributed_c10d.BarrierOptions"),
    ),
    "torch.autograd": ("Variable._execution_engine.run_backward",),
    "torch.nn": ("init._no_grad_trunc_normal_",),
    "torch.distributions": ("Distribution._validate_args",),
    "torch.ops": ("aten.add.Tensor._schema", "aten.add.Tensor._overloadpacket", "aten.add._qualified_op_name"),
    "transformers": ("PreTrainedModel._from_config",),
}
"""By module; what cannot be imported by name."""
OF_A_MODULE = ("_parameters", "_buffers", "_backward_hooks", "_backward_pre_hooks")
OF_A_FAKE_MODE = ("_allow_unsafe_data_ptr_access",)


def imported() -> list[tuple[str, str]]:
    """Module and name of all that parsim/private.py imports of torch."""
    nodes = [node for node in ast.walk(ast.parse(PRIVATE.read_text())) if isinstance(node, ast.ImportFrom)]
    return [
        (node.module or "", entry.name) for node in nodes for entry in node.names if (node.module or "").startswith("torch")
    ]


def is_private(module: str) -> bool:
    return module.startswith(("torch", "transformers")) and any(re.match(r"_(?!_)", part) for part in module.split("."))


def test_names_are_where_this_release_has_them() -> None:
    wanted = [*imported(), *((module, name) for module, names in ATTRIBUTES.items() for name in names)]
    moved = []
    for module, name in wanted:
        if module == "transformers":
            pytest.importorskip("transformers")
        try:
            owner = torch.ops if module == "torch.ops" else importlib.import_module(module)
            reduce(getattr, name.split("."), owner)
        except (ImportError, AttributeError):
            moved.append(f"{module}.{name}")
    moved += [f"torch.nn.Module().{name}" for name in OF_A_MODULE if not hasattr(torch.nn.Module(), name)]
    assert not moved, f"torch {torch.__version__} has moved {', '.join(moved)}: say so in parsim/private.py, and where it went"


def test_fake_modes_have_what_parsim_reads() -> None:
    from parsim.private import FakeTensorMode

    missing = [name for name in OF_A_FAKE_MODE if not hasattr(FakeTensorMode(), name)]
    assert not missing, f"torch {torch.__version__} has moved FakeTensorMode.{', '.join(missing)}"


def test_sockets_of_readers_go_where_python_is_told() -> None:
    """`parsim.execute.processes.rank` names the folder in a private place: multiprocessing has no other."""
    from multiprocessing import process, util

    assert isinstance(process.current_process()._config, dict)  # type: ignore[attr-defined]
    process.current_process()._config["tempdir"] = "/here"  # type: ignore[attr-defined]
    try:
        assert util.get_temp_dir() == "/here"
    finally:
        del process.current_process()._config["tempdir"]  # type: ignore[attr-defined]


def test_private_modules_are_imported_in_one_place() -> None:
    wrong = []
    for path in [*(ROOT / "parsim").rglob("*.py"), *(ROOT / "calibration").rglob("*.py")]:
        if path == PRIVATE:
            continue
        source = path.read_text(encoding="utf-8")
        if not re.search(r"\b(torch|transformers)\b[\w.]*\._", source):
            continue
        for node in ast.walk(ast.parse(source)):
            modules = [entry.name for entry in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            modules += [text] if text.startswith("torch._") else []
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {module}" for module in modules if is_private(module)]
    assert not wrong, "import these from parsim.private: " + "; ".join(wrong)
