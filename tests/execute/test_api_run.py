"""The session of the README on this machine: a script without a main guard plans, runs, compares and reads the run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """\
[model]
name = "mymodel_of_session:net"
args = { width = 32 }
input_shape = [1, 8, 8]
[cluster]
profile = "this-machine"
devices = 2
[training]
global_batch = 16
steps = 8
[plan]
strategy = "dp"
"""

FACTORY = """\
from torch import nn
def net(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""

SESSION = """\
import json, sys
from pathlib import Path
import parsim as ps

answer = ps.plan(sys.argv[1])
again = ps.plan(sys.argv[1])
assert again.chosen.problem.cluster.profile == answer.chosen.problem.cluster.profile, "calibrated twice"
assert len(list(Path(sys.argv[2]).glob("profiles/*.json"))) == 1
assert answer.chosen.result.cost_sources["measured"] > 0, answer.chosen.result.cost_sources
for nproc in (1, 3):
    try:
        ps.run(answer.chosen, nproc=nproc)
    except ps.ParsimError as error:
        assert "processes than the plan has ranks (2" in str(error), error
    else:
        raise AssertionError(f"{nproc} processes were accepted")
assert not Path("runs").exists()
measured = ps.run(answer.chosen, out="run")
measured.compare()
table = measured.table()
assert list(table.kind[:1]) == ["step"] and {"forward", "backward", "all_reduce", "optimizer"} <= set(table.kind)
assert len(measured.losses) == 8 and measured.step_s > 0
ranks = measured.breakdown()
assert len(ranks) == 2 and (ranks.compute_s < ranks.step_s).all()
assert len(measured.timeline()) == len(answer.chosen.timeline())
opened = ps.open_run("run")
assert opened.step_s == measured.step_s and repr(opened) == repr(measured)
checked = ps.validate(opened.prediction, out="rounds", rounds=4, history="history.jsonl")
assert checked.comparison.aa_floor is not None and Path("history.jsonl").read_text().count("\\n") == 1
for value in (measured, checked):
    assert len(repr(value).splitlines()) <= 15 and value._repr_html_().count("<table>") == 2
print(json.dumps({"folder": str(measured.folder), "repr": repr(measured)}))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_the_session_with_a_factory_beside_the_run_file(tmp_path: Path) -> None:
    """The processes of the calibration and of the runs find the factory too, from another folder than the script's own."""
    mine, home, here = tmp_path / "mine", tmp_path / "home", tmp_path / "here"
    for folder in (mine, here):
        folder.mkdir()
    (mine / "mymodel_of_session.py").write_text(FACTORY)
    (mine / "run.toml").write_text(RUN)
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    command = [sys.executable, str(script), str(mine / "run.toml"), str(home)]
    environment = {**os.environ, "PARSIM_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here, timeout=580, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Predicted against measured" in done.stdout
    assert "Error by kind of task" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["folder"] == "run"
    assert "Calibrating" in done.stderr
    assert str(home) in done.stderr, "which profile serves is told"
