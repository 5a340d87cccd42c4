"""Checkpoints from before a vocabulary could be cut into padded pieces: they load bit for bit, and training goes on from them.

The archive holds two run folders of commit 2bc8006, gpt_small after three steps on two ranks: a vocabulary of 38 in two pieces
of 19 rows, and one of 37, which that version kept whole on every rank. `weights.pt` is what it exported.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from parsim.app.functions import open_run, run  # noqa: E402
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state  # noqa: E402
from tests.execute.test_bad_run import cpu_profile  # noqa: E402
from tests.execute.test_padded_vocabulary import APART, RUN, SHARED  # noqa: E402

ARCHIVE = Path(__file__).parent / "2bc8006" / "vocabularies.tar.gz"
STEPS, ENTRIES_BEFORE = 3, 8


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """As they lay on the disk."""
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", [37, 38])
def test_weights_are_those_that_the_old_version_exported(folders: Path, size: int) -> None:
    place = folders / f"v{size}"
    manifests = [json.loads(path.read_text()) for path in place.rglob("rank-*.json")]
    cut = [entry["fragments"]["weights"]["wte.weight"] for entry in manifests if "wte.weight" in entry["names"]["weights"]]
    assert {len(entry) for entry in cut} == {ENTRIES_BEFORE}
    assert {entry[3] for entry in cut} == ({2} if size == 38 else {1})
    checkpoint = latest_checkpoint(place / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    state, expected = load_state(checkpoint), torch.load(place / "weights.pt", weights_only=True)
    assert state.weights["wte.weight"].shape == (size, 8)
    assert state.weights.keys() == {name for name in expected if name in state.weights}
    for name, value in state.weights.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [37, 38])
@pytest.mark.xdist_group("launch")
def test_training_goes_on_in_padded_pieces(folders: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Two more steps with the vocabulary in two pieces equal two more on replicas."""
    profile = cpu_profile()
    fits = profile["communication"]["fits"]
    fits += [{**fits[0], "operation": operation} for operation in ("reduce_scatter", "all_gather", "all_to_all")]
    (folders / "profile.json").write_text(json.dumps(profile))
    monkeypatch.chdir(folders)
    exported = []
    for name, plan in (("pieces", SHARED), ("replicas", APART)):
        shutil.copytree(folders / f"v{size}", folders / name)
        text = RUN.format(steps=STEPS + 2, plan=plan).replace("hidden = 16", "hidden = 8").replace("seq = 6", "seq = 4")
        (folders / "run.toml").write_text(text.replace("vocab = 37", f"vocab = {size}"))
        result = run(folders / "run.toml", out=name, resume=True).to_dict()
        assert ("shard:vocabulary/2" in str(result["plan"])) == (plan == SHARED)
        exported.append(torch.load(open_run(folders / name).export_weights(format="state_dict"), weights_only=True))
    start = torch.load(folders / f"v{size}" / "weights.pt", weights_only=True)
    assert exported[0].keys() == exported[1].keys() == start.keys()
    assert not torch.equal(exported[0]["wte.weight"], start["wte.weight"])
    for name, value in exported[1].items():
        torch.testing.assert_close(exported[0][name], value, rtol=1e-5, atol=1e-6, msg=name)
