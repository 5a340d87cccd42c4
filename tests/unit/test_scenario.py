"""scenario.toml: what is read, and what one is told about every wrong key."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsim.engines.scenario.scenario import LinkChange, Scenario, Straggler, check_places, load_scenario, parse_scenario
from parsim.errors import ScenarioError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile

CLUSTER = cluster_from_profile(load_profile("dgx1-v100-32gb"), 8)

WHOLE = """
seed = 3
start_s = 10.0
share_links = true
[jitter]
distribution = "gamma"
compute_sigma = 0.05
[[stragglers]]
rank = 3
factor = 1.5
until_s = 100.0
[[links]]
between = ["gpu0", "gpu3"]
bandwidth_factor = 0.5
from_s = 50.0
[asynchronous]
merge_s = 0.01
[run]
epochs = 2
samples_per_epoch = 1000
[checkpoints]
interval_s = 600.0
write_s = 10.0
[failures]
node_mtbf_s = 1e6
at = [{ at_s = 100.0, rank = 2 }]
[device]
busy_w = 300.0
"""


def test_a_whole_scenario_is_read() -> None:
    scenario = parse_scenario(WHOLE)
    assert scenario.stragglers == (Straggler(rank=3, factor=1.5, until_s=100.0),)
    assert scenario.links == (LinkChange(between=("gpu0", "gpu3"), bandwidth_factor=0.5, from_s=50.0),)
    assert scenario.change_times_s == (50.0, 100.0)
    assert scenario.run is not None
    assert scenario.run.epochs == 2
    assert scenario.failures.at[0].rank == 2
    check_places(scenario, 8, CLUSTER)


def test_an_empty_file_changes_nothing() -> None:
    assert parse_scenario("") == Scenario()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[stragler]]\nrank = 1", r"unknown key stragler .*did you mean stragglers"),
        ("[[stragglers]]\nrank = 1\nfaktor = 2.0", r"unknown key stragglers.0.faktor \(= 2.0\); did you mean factor\?"),
        ("[[stragglers]]\nrank = 1\nfactor = -2.0", r"stragglers.0.factor = -2.0: must be greater than 0"),
        ("[[stragglers]]\nrank = 1\nfactor = nan", r"stragglers.0.factor = nan: must be"),
        ("[[stragglers]]\nrank = 1", r"stragglers.0.factor is missing; add it"),
        ("[[stragglers]]\nrank = 1\nfactor = 2.0\nfrom_s = 5.0\nuntil_s = 5.0", r"until_s \(5\) must lie after from_s \(5\)"),
        ("[[links]]\nbandwidth_factor = -0.5", r"links.0.bandwidth_factor = -0.5: must be greater than or equal to 0"),
        ('[jitter]\ndistribution = "lognorm"', r"jitter.distribution = 'lognorm' is unknown; did you mean lognormal"),
        ('[jitter]\ndistribution = "uniform"\ncompute_sigma = 0.8', r"would fall below 0; sigma <= 0.577"),
        ("[failures]\nat = [{ at_s = 3.0 }]", r"one rank or of one node; give one of the two keys"),
        ("[checkpoints]\ninterval_s = 10.0", r"write_s, or its bytes over write_bytes_per_s"),
        ("[device]\nidle_w = 100.0", r"busy_w \(0\) must not be below idle_w \(100\)"),
        ("[run]\nepochs = 1\nsamples_per_epoch = 0", r"run.samples_per_epoch = 0: must be greater than or equal to 1"),
        ("seed = ", r"is not TOML"),
    ],
)
def test_a_wrong_key_is_told_with_value_rule_and_fix(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parse_scenario(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[stragglers]]\nrank = 8\nfactor = 2.0", r"stragglers.0: no rank 8: the plan has ranks 0 to 7"),
        ('[[links]]\nbetween = ["gpu0", "gpx3"]\nbandwidth_factor = 0.5', r"no link end 'gpx3'; did you mean gpu3"),
        (
            '[[links]]\nbetween = ["gpu0", "gpu5"]\nbandwidth_factor = 0.5',
            r"no link connects gpu0 and gpu5 .* connected to gpu1",
        ),
        ("[failures]\nat = [{ at_s = 3.0, node = 4 }]", r"no node 4 to fail: the plan's ranks sit on node 0"),
        ("[failures]\nat = [{ at_s = 3.0, rank = 9 }]", r"failures.at.0: no rank 9"),
    ],
)
def test_what_is_not_there_is_told_with_near_matches(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        check_places(parse_scenario(text), 8, CLUSTER)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no scenario file"):
        load_scenario(tmp_path / "none.toml")
