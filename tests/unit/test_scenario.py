"""scenario.toml: what is read, and what one is told about every wrong key."""

from __future__ import annotations

from parsim.engines.scenario import LinkChange, Scenario, Straggler, check_places, parse_scenario
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
