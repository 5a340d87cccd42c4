"""What all tests share: Hypothesis settings, and which tests must not run at the same time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from parsim.execute.processes import launch
from tests.commands import Told, status_of
from tests.warm_ranks import STARTED_COLD
from tests.warm_ranks import start as warm_start

# Models are traced once in a run of the tests; none is read that an earlier run has traced.
MODELS = tempfile.TemporaryDirectory(prefix="parsim-test-models-")
os.environ["PARSIM_MODEL_CACHE"] = MODELS.name
# Run files of tests name modules of the repository, wherever the files lie.
os.environ["PARSIM_ALLOW_CODE"] = "1"

# A shared machine pauses at random: a deadline per example would fail at random.
settings.register_profile("parsim", deadline=None, print_blob=True)
settings.load_profile("parsim")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group for `--dist loadgroup`: a file stays on one worker (it may share fixtures), and all of tests/execute on one,
    since those tests start processes of their own and would starve each other."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            path = Path(item.path).relative_to(config.rootpath)
            group = "execute" if path.parts[:2] == ("tests", "execute") else str(path)
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Calls `parsim WORDS`: exit status, stdout and stderr."""
    return lambda *words: (status_of(monkeypatch, *words), *capsys.readouterr())


@pytest.fixture(autouse=True)
def warm_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start by a fork, except in the files that are about their start and end."""
    if request.path.name not in STARTED_COLD:
        monkeypatch.setattr(launch, "start_rank", warm_start)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` are skipped, with the reason, where torch sees no GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device; torch {torch.__version__} sees none")
