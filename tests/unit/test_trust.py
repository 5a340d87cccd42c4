"""A run file is code as soon as it names some: what may be imported, and what is called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from parsim.app.config import load_config
from parsim.app.run_folder import RunFolder
from parsim.errors import ConfigError, ModelError
from parsim.model.build import build_module
from parsim.model.spec import ModelSpec

RUN = """\
[model]
name = "{name}"
input_shape = [4]
{more}
[cluster]
profile = "dgx1-v100-32gb"
devices = 2
[training]
global_batch = 8
"""
MINE = """\
from torch import nn
from shutil import rmtree
made = nn.Linear(4, 2)
number = 3
class Own(nn.Module):
    pass
class NoModule:
    pass
def net():
    return nn.Linear(4, 2)
"""


@pytest.fixture
def distrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARSIM_ALLOW_CODE")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "module_of_trust_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "module_of_trust_test", raising=False)
    return "module_of_trust_test"


def run_file(folder: Path, name: str, more: str = "") -> Path:
    path = folder / "RUN.toml"
    path.write_text(RUN.format(name=name, more=more))
    return path


@pytest.mark.usefixtures("distrusted")
class TestRunFiles:
    def test_a_module_beside_the_file_is_trusted(self, tmp_path: Path) -> None:
        (tmp_path / "nets_of_trust_test.py").write_text(MINE)
        assert load_config(run_file(tmp_path, "nets_of_trust_test:net")).model.name == "nets_of_trust_test:net"

    def test_a_module_elsewhere_needs_the_users_word(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("os:system", "antigravity:fly", "torch.nn:Linear"):
            with pytest.raises(ConfigError, match=rf"model\.name = '{name}' runs code .* give --allow-code"):
                load_config(run_file(tmp_path, name))
        assert "antigravity" not in sys.modules
        monkeypatch.setenv("PARSIM_ALLOW_CODE", "1")
        assert load_config(run_file(tmp_path, "torch.nn:Linear")).model.name == "torch.nn:Linear"

    def test_a_folder_that_the_file_names_is_not_its_own(self, tmp_path: Path) -> None:
        other, folder = tmp_path / "other", tmp_path / "runs"
        other.mkdir()
        folder.mkdir()
        (other / "nets_of_trust_test.py").write_text(MINE)
        with pytest.raises(ConfigError, match="--allow-code"):
            load_config(run_file(folder, "nets_of_trust_test:net", f'import_folder = "{other}"'))

    def test_a_run_folder_is_looked_at_without_its_model(self, tmp_path: Path) -> None:
        """Its config names the folder of the run file, and a report makes no model. Rows are imported where they are read."""
        mine, kept = tmp_path / "mine", RunFolder(tmp_path / "kept")
        for folder in (mine, kept.path):
            folder.mkdir()
        (mine / "nets_of_trust_test.py").write_text(MINE)
        (kept.path / "evil_of_trust_test.py").write_text("raise AssertionError('imported')")
        text = RUN.format(name="nets_of_trust_test:net", more=f'import_folder = "{mine}"')
        kept.config.write_text(text)
        assert kept.read_config().model.name == "nets_of_trust_test:net"
        kept.config.write_text(RUN.format(name="nets_of_trust_test:net", more="") + 'optimizer = "evil_of_trust_test:ROW"\n')
        with pytest.raises(ConfigError, match=r"training\.optimizer .* runs code"):
            kept.read_config()

    def test_rows_are_code_too(self, tmp_path: Path) -> None:
        path = run_file(tmp_path, "mlp")
        path.write_text(path.read_text().replace("input_shape = [4]\n", "") + 'optimizer = "evil_of_trust_test:ROW"\n')
        with pytest.raises(ConfigError, match=r"training\.optimizer = 'evil_of_trust_test:ROW' runs code"):
            load_config(path)

    def test_what_the_user_types_is_trusted(self, tmp_path: Path) -> None:
        path = run_file(tmp_path, "mlp")
        path.write_text(path.read_text().replace("input_shape = [4]\n", ""))
        assert load_config(path, ["model.name=torch.nn:Linear"]).model.name == "torch.nn:Linear"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os:system", "is of the type builtin_function_or_method, and no factory"),
        ("shutil:rmtree", "not annotated to return an nn.Module, so it is not called"),
        ("subprocess:Popen", "is the class Popen, no nn.Module"),
        ("builtins:eval", "no factory"),
        ("{mine}:rmtree", "not annotated to return an nn.Module, so it is not called"),
        ("{mine}:NoModule", "is the class NoModule, no nn.Module"),
        ("{mine}:number", "is of the type int, and no factory"),
        ("{mine}:made", "is of the type Linear, and no factory"),
    ],
)
def test_what_is_no_factory_of_a_module_is_not_called(mine: str, tmp_path: Path, name: str, said: str) -> None:
    """rmtree would remove the folder."""
    victim = tmp_path / "victim"
    victim.mkdir()
    argument = {"os:system": "command", "shutil:rmtree": "path", "subprocess:Popen": "args"}.get(name, "path")
    value = f"rmdir {victim}" if name in ("os:system", "subprocess:Popen") else str(victim)
    with pytest.raises(ModelError, match=said):
        build_module(ModelSpec(name=name.format(mine=mine), args=((argument, value),)))
    assert victim.is_dir()


@pytest.mark.parametrize("name", ["{mine}:net", "{mine}:Own", "torch.nn:Identity"])
def test_factories_are_called(mine: str, name: str) -> None:
    assert build_module(ModelSpec(name=name.format(mine=mine))) is not None
