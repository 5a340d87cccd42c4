"""Profiles: what is shipped, what is refused and how, and the way to a file and back."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.functions import plan
from parsim.errors import ParsimError, ProfileError
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import RankRecord
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import Network
from parsim.hardware.profile import Profile, parse_profile, save_profile, shipped_profiles
from parsim.hardware.records import TABLE_MIN_ROWS, from_text, parse_record, to_text
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.timeline import Timeline

V100 = ("dgx1-v100-16gb", "dgx1-v100-32gb")
PAIRS = {"03": 2, "04": 2, "12": 2, "15": 2, "23": 2, "47": 2, "56": 2, "67": 2} | dict.fromkeys(
    ("01", "02", "13", "26", "37", "45", "46", "57"), 1
)


def minimal() -> dict[str, Any]:
    """The smallest document that is a profile."""
    number = {"value": 1e9, "source": "made up"}
    return {
        "schema_version": 1,
        "name": "tiny",
        "description": "for tests",
        "provenance": {"created": "today", "command": "none", "machine": "none"},
        "sources": {"made up": {"kind": "assumption", "text": "for tests"}},
        "device_types": {
            "toy": {
                "kind": "cpu",
                "memory_bytes": number,
                "memory_bandwidth_bytes_per_s": number,
                "context_bytes": number,
                "peak_flop_per_s": {"fp32": number},
            }
        },
        "devices": [{"index": 0, "type": "toy"}, {"index": 1, "type": "toy"}],
        "link_kinds": {"shm": {"bandwidth_bytes_per_s": number, "latency_s": {"value": 1e-6, "source": "made up"}}},
        "links": [{"a": "cpu0", "b": "cpu1", "kind": "shm"}],
        "communication": {
            "backend": "gloo",
            "points": [
                {"operation": "all_reduce", "group": [0, 1], "size_bytes": size, "seconds": 1e-3, "source": "made up"}
                for size in range(TABLE_MIN_ROWS + 2)
            ],
        },
    }


def changed(path: str, value: Any) -> str:
    """The minimal document with one value replaced (or, for None, removed), as JSON."""
    document = json.loads(json.dumps(minimal()))
    node: Any = document
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for part in parents:
        node = node[part]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return json.dumps(document)


# --- shipped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", V100)
def test_the_shipped_v100_profiles(name: str) -> None:
    profile = load_profile(name)
    assert name in shipped_profiles()
    assert profile.name == name
    assert len(profile.devices) == 8
    links = {f"{link.a[-1]}{link.b[-1]}": link.lanes for link in profile.links if link.kind == "nvlink"}
    assert links == PAIRS
    assert all(sum(lanes for pair, lanes in links.items() if str(device) in pair) == 6 for device in range(8))
    switches = {link.a: link.b for link in profile.links if link.kind == "pcie" and link.a.startswith("gpu")}
    assert switches == {f"gpu{index}": f"pcie{index // 2}" for index in range(8)}
    assert profile.link_kinds["nvlink"].bandwidth_bytes_per_s.value == pytest.approx(22.4e9, rel=0.02)
    assert profile.link_kinds["pcie"].bandwidth_bytes_per_s.source == "pcie-rate"
    assert profile.sources["context"].kind == "assumption"


def test_the_two_v100_profiles_differ_in_memory_only() -> None:
    small, large = (load_profile(name).model_dump() for name in V100)
    assert small["device_types"]["V100-SXM2"].pop("memory_bytes")["value"] == 16 * 2**30
    assert large["device_types"]["V100-SXM2"].pop("memory_bytes")["value"] == 32 * 2**30
    for document in (small, large):
        del document["name"], document["description"]
    assert small == large


@pytest.mark.parametrize("name", V100)
def test_a_profile_keeps_the_points_of_its_fits_and_stays_small(name: str) -> None:
    profile = load_profile(name)
    assert Counter(point.source for point in profile.communication.points) == {
        "vtrain": 60,
        "nccl-log-8": 50,
        "nccl-log-4-pcie": 30,
    }
    assert all(point.measured_on for point in profile.communication.points if point.source.startswith("nccl-log"))
    kinds = {(fit.kind, fit.phase, fit.precision) for fit in profile.compute.operator_fits}
    assert ("matmul", "forward", "fp32") in kinds
    assert len(profile.compute.operator_points) >= max(fit.points for fit in profile.compute.operator_fits)
    assert sum(len(text) for text in to_text(profile.model_dump(mode="json")).splitlines()) < 400_000


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_is_read_and_written_unchanged(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert profile.provenance.command
    path = tmp_path / "again.json"
    save_profile(profile, path)
    assert load_profile(str(path)) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["again.json"], "no partial file stays"
    assert cluster_from_profile(profile).size == len(profile.devices)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_file_or_name_that_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'dgx1-v100-32g'; did you mean .*dgx1-v100-32gb"):
        load_profile("dgx1-v100-32g")
    with pytest.raises(ProfileError, match=r"no profile file .*mine\.json; write one with `parsim calibrate --out"):
        load_profile(str(tmp_path / "mine.json"))
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"cannot read profile .*binary\.json"):
        load_profile(str(path))


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"name": nope}', "not json at all", "[NaN]", "[Infinity]"])
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(ProfileError, match=r"profile broken\.json is not JSON: .* at line \d+ column \d+; fix it"):
        parse_profile(text, "broken.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"profile"'])
def test_json_that_is_not_an_object(text: str) -> None:
    with pytest.raises(ProfileError, match="profile x is broken: profile: Input should be"):
        parse_profile(text, "x")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("link_kinds.shm.bandwidth_bytes_per_s.value", -1.0, r"link_kinds\.shm\.bandwidth_bytes_per_s\.value: .*\(got -1\.0\)"),
        ("communication.points.3.seconds", -2e-3, r"communication\.points\.3\.seconds: .*greater than 0 \(got -0\.002\)"),
        ("communication.points.3.seconds", "fast", r"communication\.points\.3\.seconds: .*number.*\(got 'fast'\)"),
        ("device_types.toy.memory_bytes.source", None, r"device_types\.toy\.memory_bytes\.source: Field required"),
        ("device_types.toy.memory_bytes.source", "nowhere", r"source 'nowhere' is not listed under sources"),
        ("device_types.toy.memory_bytes.source", "made upp", r"'made upp' is not listed under sources; did you mean made up"),
        ("links.0.kind", "shn", r"link cpu0-cpu1 has kind 'shn'; did you mean shm"),
        ("links.0.lanes", 0, r"links\.0\.lanes: .*greater than or equal to 1 \(got 0\)"),
        ("devices.1.type", "toi", r"device 1 has type 'toi'; did you mean toy"),
        ("devices.1.index", 0, r"device numbers must be unique, got \[0, 0\]"),
        ("devices", [], r"devices is empty"),
        ("sources.made up.kind", "guess", r"sources\.made up\.kind: Input should be 'measurement'"),
        ("schema_version", 2, r"schema_version must be 1, got 2; a newer parsim wrote it: upgrade parsim"),
        ("communication.backend", "mpi", r"communication\.backend: Input should be 'nccl' or 'gloo'"),
        ("mem_gbs", 3, r"mem_gbs: Extra inputs are not permitted"),
        ("name", None, r"name: Field required"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(path: str, value: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=f"profile bad is broken: .*{message}.*or calibrate again"):
        parse_profile(changed(path, value), "bad")


def test_link_models_name_a_known_link_kind() -> None:
    document = load_profile("dgx1-v100-32gb").model_dump(mode="json")
    document["communication"]["link_model"]["link_kind"] = "nvlinc"
    with pytest.raises(ProfileError, match="link_model has link_kind 'nvlinc'; did you mean nvlink"):
        parse_profile(json.dumps(document), "bad")


def test_many_problems_are_counted() -> None:
    document = minimal()
    for point in document["communication"]["points"]:
        point["seconds"] = -1
    with pytest.raises(ProfileError, match=rf"\(\+{TABLE_MIN_ROWS + 2 - 3} more\)"):
        parse_profile(json.dumps(document), "bad")


# --- tables -----------------------------------------------------------------------------------------------------------


def test_long_lists_are_written_as_tables_and_read_back() -> None:
    profile = parse_profile(json.dumps(minimal()), "tiny")
    text = to_text(profile.model_dump(mode="json"))
    table = json.loads(text)["communication"]["points"]
    assert table["columns"] == ["size_bytes"]
    assert table["constants"]["operation"] == "all_reduce"
    assert len(table["rows"]) == TABLE_MIN_ROWS + 2
    assert parse_profile(text, "tiny") == profile


def test_a_table_row_of_the_wrong_length_is_named() -> None:
    document = json.loads(to_text(Profile.model_validate(minimal()).model_dump(mode="json")))
    document["communication"]["points"]["rows"][4] = [1, 2]
    with pytest.raises(ProfileError, match=r"communication\.points\.rows\.4 must have 1 entries \(size_bytes\), got \[1, 2\]"):
        parse_profile(json.dumps(document), "bad")
    document["communication"]["points"]["rows"] = 7
    with pytest.raises(ProfileError, match=r"communication\.points needs the lists columns and rows"):
        parse_profile(json.dumps(document), "bad")


scalars = (
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
records = st.lists(
    st.fixed_dictionaries({"a": scalars, "b": scalars, "shape": st.dictionaries(st.text(), scalars)}), max_size=20
)


@given(document=st.dictionaries(st.sampled_from(["points", "components", "other"]), records | scalars | st.lists(scalars)))
def test_any_document_survives_the_layout(document: dict[str, Any]) -> None:
    assert from_text(to_text({"top": document}), "x") == {"top": document}


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_ranks_follow_the_listed_devices() -> None:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), [5, 0, 3])
    assert [device.index for device in cluster.devices] == [5, 0, 3]
    assert cluster.size == 3


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (9, "has 8 devices, 9 were asked for; ask for 1 to 8"),
        (0, "has 8 devices, 0 were asked for"),
        ([0, 8], r"has no device 8; it has \[0, 1"),
        ([1, 1], r"lists a device twice: \[1, 1\]"),
    ],
)
def test_devices_the_profile_has_not(devices: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        cluster_from_profile(load_profile("dgx1-v100-32gb"), devices)


# Files that a later version of parsim wrote are refused with what to do.

LATER = r"schema_version must be \d, got 99; a newer parsim wrote it: upgrade.*again"
ONE = Plan(strategy="single", mesh=Mesh(), stages=(Stage(components=("x",), ranks=(0,)),), global_batch=1)
RUN = RunSpec(
    name="run", model=ModelSpec(name="mlp"), model_path="", plan=ONE, optimizer="sgd", learning_rate=0.1, dataset="digits"
)
EMPTY = np.zeros(0)


@dataclass(frozen=True)
class Kind:
    """A kind of file: writes one, and reads it."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]


def _model(path: Path) -> None:
    plan("mlp", cluster="dgx1-v100-32gb", global_batch=8, strategy="single").problem.model.save(path)


KINDS = {
    "plan.json": Kind(ONE.save, Plan.load),
    "model.json": Kind(_model, Model.load),
    "job.json": Kind(Job(output="", mode="train", runs=(RUN,), steps=1).save, Job.load),
    "rank0.json": Kind(
        lambda path: RankRecord(rank=0, rounds=[], steps=[], losses=[], cpu_s=[], peak_bytes=0).save(path.parent),
        lambda path: RankRecord.load(path.parent, 0),
    ),
    "timeline.json.gz": Kind(
        Timeline(source="static", resources=(), task=EMPTY, resource=EMPTY, start_s=EMPTY, end_s=EMPTY).save, Timeline.load
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_a_later_version_says_what_to_do(tmp_path: Path, name: str) -> None:
    path, kind = tmp_path / name, KINDS[name]
    kind.write(path)
    kind.read(path)
    packed = name.endswith(".gz")
    text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    document: dict[str, Any] = {**json.loads(text), "schema_version": 99}
    changed = json.dumps(document).encode()
    path.write_bytes(gzip.compress(changed) if packed else changed)
    with pytest.raises(ParsimError, match=LATER):
        kind.read(path)


def test_a_network_of_a_later_version_says_what_to_do() -> None:
    with pytest.raises(ParsimError, match=r"network net.* schema_version must be 1, got 99; a newer parsim wrote it"):
        parse_record(Network, '{"schema_version": 99}', "net", "network")
