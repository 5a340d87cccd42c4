"""Clusters of several nodes at the boundary: networks from files, [cluster] of a run file, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import parsim
from parsim.app.check import what_would
from parsim.app.config import parse_config
from parsim.app.load import cluster_of
from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.communication.contention import ring_set
from parsim.errors import ConfigError, CostError, ParsimError, ProfileError
from parsim.hardware.cluster import cluster_from_profile, cluster_links, nodes_of
from parsim.hardware.compose import NodeGroup, load_profile, mixed_cluster
from parsim.hardware.parts import Network, load_network, shipped_networks
from parsim.hardware.profile import shipped_profiles
from parsim.hardware.records import parse_record
from parsim.hardware.topology import Topology
from parsim.work import Collective
from tests.commands import Told
from tests.round_machines import network, network_dict, pair_machine

RUN = """
[model]
name = "gpt"
args = { hidden = 64, layers = 2, heads = 4, vocab = 512, seq = 32 }
[cluster]
profile = "p3-16xlarge"
nodes = 2
network = "ethernet-25g"
devices = 2
[training]
global_batch = 16
[plan]
strategy = "dp"
"""


@pytest.mark.parametrize("name", shipped_networks())
def test_every_shipped_network_joins_every_shipped_machine(name: str) -> None:
    found = load_network(name)
    assert found.name == name
    for profile in (load_profile(machine) for machine in shipped_profiles()):
        cluster = cluster_from_profile(profile, nodes=3, network=found)
        assert cluster.size == 3 * len(profile.devices)
        assert cluster.name == f"3 x {profile.name} on {name}"
        assert len(cluster.topology.parts()) == 1


@pytest.mark.parametrize(
    ("machine", "lanes", "members", "rings"),
    [
        ("dgx1-v100-32gb", 6, 8, 6),
        ("p3-16xlarge", 6, 8, 6),
        ("summit-v100", 4, 3, 4),
        ("dgx2-v100", 6, 16, 6),
        ("pcie-8xv100", 0, 4, 1),
    ],
)
def test_shipped_topologies(machine: str, lanes: int, members: int, rings: int) -> None:
    """NVLink lanes per GPU, and the rings that fit: cube mesh and NVSwitch all six; three GPUs of a Summit socket, joined two
    by two, two of each direction; a PCIe tree one through its root complex."""
    profile = load_profile(machine)
    topology = cluster_from_profile(profile).topology
    assert sum(link.lanes for link in topology.at("gpu0") if link.kind == "nvlink") == lanes
    model = profile.communication.link_model
    assert model is not None
    assert ring_set(topology, model.link_kind, tuple(f"gpu{index}" for index in range(members))).count == rings


def test_a_two_level_fabric() -> None:
    """5 nodes, 2 per leaf: three leaves; the last serves one node and has half the uplinks."""
    links = cluster_links(pair_machine(), 5, network(nodes_per_leaf=2, oversubscription=2.0))
    up = {link.a: link for link in links if link.b == "spine0"}
    assert sorted(up) == ["leaf0", "leaf1", "leaf2"]
    assert [up[leaf].capacity_bytes_per_s for leaf in sorted(up)] == [5e9, 5e9, 2.5e9]
    assert len(Topology(links).parts()) == 1
    assert sum(link.b.startswith("leaf") and "nic" in link.a for link in links) == 5


def test_devices_are_the_first_of_every_node_or_numbers() -> None:
    profile = load_profile("p3-16xlarge")
    first = cluster_from_profile(profile, 2, nodes=3, network="ethernet-25g")
    assert [device.index for device in first.devices] == [0, 1, 8, 9, 16, 17]
    assert [device.node for device in first.devices] == [0, 0, 1, 1, 2, 2]
    listed = cluster_from_profile(profile, [15, 0], nodes=2, network="ethernet-25g")
    assert [device.index for device in listed.devices] == [15, 0]
    assert listed.places == ((1, 7), (0, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 2}, "nodes = 2 needs a network between them: one of .*infiniband-100g"),
        ({"nodes": 0}, "nodes >= 1, got 0"),
        ({"nodes": 2, "network": "infinband-100g"}, "unknown network 'infinband-100g'; did you mean infiniband-100g"),
        ({"nodes": 2, "network": "none/such.json"}, "cannot read network none/such.json"),
        ({"nodes": 2, "network": "efa-100g", "devices": 9}, "has 8 devices, 9 were asked for per node; ask for 1 to 8"),
        ({"nodes": 2, "network": "efa-100g", "devices": [0, 16]}, "no device 16"),
        ({"nodes": 2, "network": "efa-100g", "devices": [3, 3]}, "twice"),
    ],
)
def test_what_is_no_cluster(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        cluster_from_profile(load_profile("p3-16xlarge"), **arguments)


def test_a_machine_that_falls_apart() -> None:
    """Without the lane between the GPUs and the link of gpu1 to its switch."""
    whole = pair_machine()
    parted = whole.model_copy(update={"links": [link for link in whole.links if "gpu1" not in (link.a, link.b)]})
    with pytest.raises(ProfileError, match=r"falls into 2 parts that no link connects: .*\| gpu1; add the missing link"):
        cluster_from_profile(parted)


def test_a_card_that_no_gpu_reaches() -> None:
    whole = pair_machine()
    links = [link for link in whole.links if not (link.kind == "pcie" and "gpu0" in (link.a, link.b))]
    cluster = cluster_from_profile(whole.model_copy(update={"links": links}), nodes=2, network=network())
    with pytest.raises(CostError, match="gpu0 reaches no network card of its node"):
        estimate_collective(Collective(operation="all_reduce", group=(0, 2), size_bytes=8), cluster)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cards": 2}, "network test is broken: .*cards"),
        ({"protocols": []}, "network test is broken: .*protocols"),
        ({"algorithms": ["rings"]}, "network test is broken: .*algorithms"),
        ({"oversubscription": 0.5}, "oversubscription >= 1"),
        ({"bandwidth": 0.0}, r"card: bandwidth_bytes_per_s = 0 bytes/s: must be >= 1e\+06"),
        ({"bandwidth": -1.0}, "bandwidth_bytes_per_s"),
        ({"sources": {"mad": {"kind": "assumption", "text": "x"}}}, "source 'made' is not listed under .*did you mean mad"),
    ],
)
def test_a_broken_network_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_record(Network, json.dumps(network_dict(**changes)), "test", "network")
    with pytest.raises(ProfileError, match="network test is not JSON"):
        parse_record(Network, "{", "test", "network")


def test_cluster_table_of_a_run_file(tmp_path: Path) -> None:
    config = parse_config(RUN.replace('"ethernet-25g"', '"nets/own.json"'), folder=tmp_path)
    assert config.cluster.network == str(tmp_path / "nets" / "own.json")
    assert parse_config(config.to_toml()) == config
    parse_config(RUN, ["plan.strategy=custom", "plan.mesh={dp=4}"])


def test_commands_take_several_nodes(tmp_path: Path, told: Told) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    name = "2 x p3-16xlarge on ethernet-25g"
    everywhere = ("--set", "plan.mesh.dp=4")  # left free, the search leaves the slow network alone
    code, out, _ = told("plan", str(file), "--json", *everywhere)
    planned = json.loads(out)
    assert code == 0
    assert planned["chosen"]["cluster"] == name
    assert len(planned["chosen"]["peak_memory_bytes"]) == 4
    code, out, _ = told("simulate", str(file), "--json", *everywhere)
    assert code == 0
    assert json.loads(out)["cluster"] == name
    other = ("--set", "cluster.network=infiniband-100g", *everywhere)
    faster = json.loads(told("simulate", str(file), "--json", *other)[1])
    assert faster["step_s"]["median"] < planned["chosen"]["step_s"]["median"]
    code, _, err = told("run", str(file))
    assert code == 1
    assert "cluster.nodes = 2: only the processes of one node can be started from here" in err


def test_cost_over_several_nodes(told: Told) -> None:
    ask = ["cost", "p3-16xlarge", "--collective", "all_reduce", "--size-bytes", "1000000"]
    code, out, _ = told(*ask, "--nodes", "2", "--network", "ethernet-25g", "--json")
    assert code == 0
    row = json.loads(out)
    assert row["cluster"] == "2 x p3-16xlarge on ethernet-25g"
    assert row["ranks"] == list(range(16))
    assert row["seconds"]["median"] > json.loads(told(*ask, "--json")[1])["seconds"]["median"]
    code, _, err = told(*ask, "--nodes", "2", "--network", "ethernet-26g")
    assert code == 1
    assert "unknown network 'ethernet-26g'; did you mean ethernet-25g" in err
    _, out, _ = told(*ask, "--nodes", "2", "--network", "ethernet-25g")
    assert "0-15" in out


@pytest.mark.parametrize(("nodes", "per_leaf"), [(2, 4), (5, 2), (8, 4)])
def test_nodes_of_copies_are_those_that_their_links_tell(nodes: int, per_leaf: int) -> None:
    joined = network(nodes_per_leaf=per_leaf, oversubscription=2.0)
    copied = cluster_from_profile(pair_machine(), nodes=nodes, network=joined)
    listed = nodes_of(Topology(cluster_links(pair_machine(), nodes, joined)))
    assert "links" not in vars(copied.topology)  # nobody has asked for them
    assert (copied.nodes.shapes, copied.nodes.leaf) == (listed.shapes, listed.leaf)
    assert copied.nodes.place == listed.place
    assert copied.nodes.leaves == listed.leaves
    assert copied.topology.links == cluster_links(pair_machine(), nodes, joined)
    again = pickle.loads(pickle.dumps(copied))
    assert (again, hash(again)) == (copied, hash(copied))
    assert copied != cluster_from_profile(pair_machine(), nodes=nodes + 1, network=joined)


# [[cluster.group]]: nodes with different GPUs in one cluster.

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
