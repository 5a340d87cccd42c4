"""[[cluster.group]]: nodes with different GPUs in one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

import parsim
from parsim.app.check import what_would
from parsim.app.config import parse_config
from parsim.app.load import cluster_of
from parsim.errors import ConfigError, ParsimError, ProfileError
from parsim.hardware.compose import NodeGroup, mixed_cluster
from parsim.hardware.network import load_network

FAST, SLOW = "h100-sxm", "a100-sxm-80gb"


def question(groups: str, cluster: str = 'network = "infiniband-400g"', plan: str = "mesh = { dp = 16 }") -> str:
    return (
        f'[model]\nname = "llama3-8b"\nargs = {{ layers = 2, seq = 1024 }}\n[cluster]\n{cluster}\n{groups}\n[training]\n'
        f'global_batch = 16\n[plan]\nstrategy = "dp"\nzero_stage = 3\nmicrobatches = 1\nrecompute = "none"\n{plan}\n'
    )


def group(gpu: str, **more: object) -> str:
    return f'[[cluster.group]]\ngpu = "{gpu}"\n' + "".join(f"{key} = {value}\n" for key, value in more.items())


def answered(folder: Path, groups: str) -> parsim.Answer:
    path = folder / "RUN.toml"
    path.write_text(question(groups), encoding="utf-8")
    answer = parsim.plan(str(path))
    assert isinstance(answer, parsim.Answer)
    return answer


def test_equal_groups_are_the_cluster_of_one_kind() -> None:
    network = load_network("infiniband-400g")
    mixed = mixed_cluster([NodeGroup(gpu=FAST), NodeGroup(gpu="h100")], network)
    assert mixed.devices == mixed_cluster([NodeGroup(gpu=FAST, nodes=2)], network).devices
    assert [device.type.name for device in mixed.devices] == [FAST] * 16
    assert "links inside" not in mixed.name


def test_every_node_has_the_gpus_of_its_group() -> None:
    mixed = mixed_cluster([NodeGroup(gpu=FAST, nodes=2), NodeGroup(gpu="l40s")], load_network("infiniband-400g"))
    assert [device.type.name for device in mixed.devices[::8]] == [FAST, FAST, "l40s"]
    assert mixed.devices[0].type.memory_bytes > mixed.devices[-1].type.memory_bytes
    assert mixed.name == "2 x 8xh100-sxm + 1 x 8xl40s on infiniband-400g, links inside all nodes as of l40s"


def test_the_profile_of_a_run_folder_gives_the_same_devices() -> None:
    groups, network = [NodeGroup(gpu=FAST), NodeGroup(gpu=SLOW)], load_network("infiniband-400g")
    mixed = mixed_cluster(groups, network)
    assert mixed_cluster(groups, network, profile=mixed.profile) == mixed
    config = parse_config(question(group(FAST) + group(SLOW)))
    assert cluster_of(config.cluster, mixed.profile).devices == mixed.devices


def test_a_step_over_all_is_as_fast_as_over_the_slower_ones(tmp_path: Path) -> None:
    """Replicas with equal batches wait for the slowest, and links are those of the slowest."""
    mixed = answered(tmp_path, group(FAST) + group(SLOW))
    slow = answered(tmp_path, group(SLOW, nodes=2))
    fast = answered(tmp_path, group(FAST, nodes=2))
    steps = [answer.chosen.step_s.median for answer in (fast, mixed, slow)]
    assert steps[0] < 0.7 * steps[1]
    assert steps[1] == pytest.approx(steps[2], rel=0.01)
    assert "of 312 dense bf16 TFLOP/s of a100-sxm-80gb" in str(slow)
    assert "of 650 dense bf16 TFLOP/s of the mean of h100-sxm and a100-sxm-80gb" in str(mixed)


def test_devices_that_a_plan_leaves_idle_are_counted(tmp_path: Path) -> None:
    answer = answered(tmp_path, group(FAST) + group(SLOW))
    used = answer.prediction.plan.world_size
    assert used == answer.problem.cluster.size
    assert "idle" not in answer.sentence()
    few = parsim.plan("mlp", cluster="8xh100-sxm", global_batch=8, settings={"plan.mesh": {"dp": 2}, "plan.strategy": "dp"})
    assert "(8 devices, 6 of them idle)" in few.sentence()
    assert answer.question.cluster.in_words == "1 nodes of h100-sxm + 1 nodes of a100-sxm-80gb"


@pytest.mark.parametrize(
    ("groups", "cluster", "message"),
    [
        (
            group(FAST),
            'network = "infiniband-400g"\ngpu = "h100"',
            r"\[\[cluster.group\]\] has cluster.gpu beside it; drop one",
        ),
        (group(FAST), 'network = "infiniband-400g"\nnodes = 3', "the groups have 1 nodes, and nodes = 3; drop nodes"),
        ("", 'network = "infiniband-400g"\ngroup = []', r"\[\[cluster.group\]\] is empty; name a GPU in each group"),
        (group(FAST) + group(SLOW), "", "cluster.nodes = 2 needs cluster.network"),
        (group(FAST, nodes=0), 'network = "infiniband-400g"', r"cluster.group.0.nodes = 0: must be >= 1"),
        (group(FAST, colour=1), 'network = "infiniband-400g"', r"unknown key cluster.group.0.colour"),
    ],
)
def test_groups_that_cannot_be(groups: str, cluster: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(question(groups, cluster))


def test_parts_that_do_not_go_together() -> None:
    network = load_network("infiniband-400g")
    with pytest.raises(ProfileError, match=r"different numbers of GPUs per node \(h100-sxm 8, a100-sxm-80gb 4\)"):
        mixed_cluster([NodeGroup(gpu=FAST), NodeGroup(gpu=SLOW, gpus_per_node=4)], network)
    with pytest.raises(ProfileError, match="unknown GPU 'h101'; did you mean h100"):
        mixed_cluster([NodeGroup(gpu=FAST), NodeGroup(gpu="h101")], network)


def test_the_config_reads_back_equal() -> None:
    config = parse_config(question(group(FAST) + group(SLOW, nodes=3)))
    assert config.cluster.nodes == 4
    assert parse_config(config.to_toml()) == config


def test_what_would_be_faster_is_not_asked_of_groups(tmp_path: Path) -> None:
    answer = answered(tmp_path, group(FAST) + group(SLOW))
    with pytest.raises(ParsimError, match="names several; change the groups"):
        what_would(answer, 0.2)
