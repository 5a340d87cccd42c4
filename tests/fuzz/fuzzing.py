"""Damaged files: every reader of parsim must refuse one with a ParsimError, or read it, within 5 s of the processor and 1 GB.

`python -m tests.fuzz.fuzzing --count 100000 --seconds 600` runs so many cases of each reader, as far as the seconds go, and
prints a table. A case that fails is printed with its seed and number. With `--record FILE` the counts are added to FILE in
small portions, quickest readers first, and the next call goes on where FILE ends; the table is that of the whole file. Cases
that failed are tried again first, and no longer count if they pass.
`results.jsonl` beside this module holds what was tried so far.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import json
import math
import random
import re
import resource
import signal
import sqlite3
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from parsim.errors import LONGEST_MESSAGE, ParsimError
from parsim.files import CONTROL, HOME_VARIABLE
from parsim.formats.deepspeed import read_deepspeed
from parsim.formats.imports import timeline_of
from parsim.formats.kineto import Trace, read_kineto, read_nsys
from parsim.formats.ledger import ledger_of
from parsim.formats.nccl_tests import read_nccl_tests, with_measured
from parsim.formats.source import SourceFile, read_source
from parsim.formats.topology import MachineTree, read_lstopo, read_topo_matrix, with_links
from parsim.hardware.compose import load_profile

LIMIT_S, PLANNED_S = 5.0, 20.0
"""Of the processor, to read a file, and to plan what was read: on a machine that others use too, the clock tells nothing."""
WAIT_S = 120.0
"""On the clock: a reader that waits for something, such as the other end of a pipe."""
LIMIT_BYTES = 2**30
PROBE, PORTION = 200, 2000
"""Cases that say how long a reader takes, and cases of a portion."""
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**9, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "[/b]", "a" * 5000, "1e9", "place:1", "os:system"),
    *([], {}, [[]], [None], {"": {}}, [1] * 1000, {"x": 1}),
)


_NUMBER = re.compile(rb"\d+(?:\.\d+)?")
ODD_NUMBERS = (
    *(b"0", b"-1", b"inf", b"nan", b"1e999", b"9" * 20, b"9" * 5000, b"1.5", b"1e9", b"100003", b"''", b"[]", b"{}", b"[1]"),
    *(b"true", b"3", b"\x1b[2J", b"*o"),
)

FRAMEWORKS = Path(__file__).parents[1] / "frameworks"
"""Files in the layout of each framework, and what `parsim` reads of them (expected.json)."""
NOT_PLANNED = (
    *("axolotl.yaml", "megatron_bert.sh", "megatron_bloom_176b.slurm", "neox_160m.yml", "megatron_deepseek_v3.sh"),
    *("megatron_gpt3_175b.sh", "megatron_mixtral_8x7b.sh", "megatron_positional.sh", "neox_20b.yml"),
    *("nanotron_smollm3.yaml", "nemo2_recipe.py", "nemo_launcher_llama2_70b.yaml", "nemo_llama_7b.yaml"),
    *("images_timm_large.sh", "images_vit_h_14.sh", "images_other.sh", "images_torchvision.sh", "nanogpt_launch.sh"),
    *("levanter.yaml", "maxtext_a3.sh", "megatron_deepspeed_moe.sh", "paddlenlp.json", "primus_maxtext.yaml"),
    *("torchtitan_671b.toml", "axolotl_launch.sh", "torchtune_run.sh", "llmfoundry_composer.sh", "trainer_deepspeed_chat.sh"),
)
"""Of these, beside those that are refused: for a size that they lack, because eight samples and GPUs do not divide as they
ask, or because their model takes half a minute to trace (`images_timm.sh` is of the same reader)."""
BATCHES = {
    "nanogpt_train_gpt2.py": 96,
    "nanogpt_shakespeare_char.py": 512,
    "images_timm.sh": 1024,
    "lightning_images.yaml": 512,
}
"""Global batches of files whose replicas take other than a power of two up to 16."""
SHIPPED = ("resnet50", "vit_b_16")
"""Models of files that have no layers to take away."""
MEGATRON = """\
OPTIONS="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --bf16"
torchrun --nproc-per-node 8 --nnodes 1 pretrain.py $OPTIONS --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --micro-batch-size 1 --global-batch-size 8 --num-experts 4 --moe-layer-freq "[0]*1+[1]*1" --use-distributed-optimizer
"""
NEMO = """\
trainer: {devices: 8, num_nodes: 1, precision: bf16}
model: {encoder_seq_length: 16, num_layers: 2, hidden_size: 64, num_attention_heads: 4, ffn_hidden_size: 128, vocab_size: 100,
  micro_batch_size: 1, global_batch_size: 8, tensor_model_parallel_size: 2, optim: &o {name: adam}, other: *o}
"""
TORCHTITAN = """\
[model]
name = "qwen3"
flavor = "0.6B"
[training]
seq_len = 128
local_batch_size = 2
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""


@dataclass(frozen=True)
class Reader:
    """One kind of file: a whole one, and what reads it from its path."""

    name: str
    sample: bytes
    file: str
    read: Callable[[Path], object]

    @property
    def is_planned(self) -> bool:
        """Whether what was read is planned, too."""
        return self.name.endswith(", planned")

    @property
    def limit_s(self) -> float:
        """Seconds of the processor that a file may take."""
        return PLANNED_S if self.is_planned else LIMIT_S


def damaged(sample: bytes, random_: random.Random) -> bytes:
    """Another file: some bytes changed, a part cut out or repeated, values of its document replaced, or numbers of its text.

    What is packed is mostly damaged inside.
    """
    if sample.startswith(b"\x1f\x8b") and random_.random() < 0.9:
        return gzip.compress(damaged(gzip.decompress(sample), random_), 1, mtime=0)
    document = _document(sample)
    if document is not None and random_.random() < 0.7:
        document = copy.deepcopy(document)
        for _ in range(random_.choice((1, 1, 1, 2, 5))):
            _change(document, random_)
        text = _nested(random_) if random_.random() < 0.01 else json.dumps(document)
        with contextlib.suppress(UnicodeEncodeError):
            return text.encode()
    content = bytearray(sample)
    numbers = list(_NUMBER.finditer(sample))
    if document is None and numbers and random_.random() < 0.5:
        for found in sorted(random_.sample(numbers, min(len(numbers), random_.choice((1, 1, 2)))), key=re.Match.start)[::-1]:
            content[found.start() : found.end()] = random_.choice(ODD_NUMBERS)
        return bytes(content)
    for _ in range(random_.choice((1, 1, 2, 8))):
        place = random_.randrange(len(content) + 1)
        match random_.randrange(5):
            case 0 if content:
                content[place % len(content)] ^= 1 << random_.randrange(8)
            case 1:
                del content[place:]
            case 2:
                del content[place : place + random_.randrange(1, 50)]
            case 3:
                content[place:place] = content[place : place + random_.randrange(1, 200)]
            case _:
                content[place:place] = random_.choice((b"\xff", b"\0", b"9" * 5000, b"[" * 2000, b'"', b"{", b"1e999", b"NaN"))
        if not content:
            break
    return bytes(content)


def _document(sample: bytes) -> Any:
    try:
        return json.loads(sample)
    except ValueError:
        return None


def _nested(random_: random.Random) -> str:
    depth = random_.choice((50, 200, 100_000))
    return "[" * depth + "]" * depth


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value."""
    found: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        node = stack.pop()
        entries: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in entries:
            found.append((node, key))
            stack.append(value)
    return found


def _change(document: Any, random_: random.Random) -> None:
    places = _places(document)
    if not places:
        return
    node, key = random_.choice(places)
    match random_.randrange(6):
        case 0 if isinstance(node, dict):
            node[random_.choice(("", "x", "schema_version", str(key) * 2))] = node.pop(key)
        case 1:
            del node[key]
        case 2 if isinstance(node, list):
            node.extend(copy.deepcopy(node[:50]))
        case 3:
            other, at = random_.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                node[key] = copy.deepcopy(other[at])
        case _:
            node[key] = copy.deepcopy(random_.choice(NASTY))


def failure_of(reader: Reader, folder: Path, content: bytes) -> str:
    """What is wrong with how the reader takes this content: a foreign exception, time, memory; "" if nothing is."""
    path = folder / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    try:
        with warnings.catch_warnings(), _limit(reader.limit_s):
            warnings.simplefilter("ignore")
            reader.read(path)
    except ParsimError as error:
        text = str(error)
        text.encode()
        if len(text) > LONGEST_MESSAGE or CONTROL.search(text):
            return f"a message of {len(text)} letters, or with control characters: {text[:300]!r}"
        if isinstance(error.__cause__, MemoryError):
            return "MemoryError"
    except _Slow:
        return f"took longer than {reader.limit_s:g} s of the processor, or {WAIT_S:g} s on the clock"
    except BaseException as error:
        return "".join(traceback.format_exception(error)[-4:])
    return ""


class _Slow(BaseException):
    """Of no class that a reader would catch."""


@contextlib.contextmanager
def _limit(processor_s: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _Slow

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, processor_s), (signal.SIGALRM, signal.ITIMER_REAL, WAIT_S))
    before = {number: signal.signal(number, stop) for number, _, _ in timers}
    for _, timer, limit_s in timers:
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def of_another_tool(check: Callable[[SourceFile], None], **given: Any) -> Callable[[Path], object]:
    """Import a file, and check what its reader makes of it, whether or not the import refuses it."""
    from parsim.app.foreign import import_file

    def read(path: Path) -> object:
        try:
            return import_file(path, **given)
        finally:
            check(read_source(path))

    return read


def nccl(source: SourceFile) -> None:
    log = read_nccl_tests(source)
    assert log.tests
    assert all(test.rows for test in log.tests)
    made, groups = with_measured(load_profile("8xh100-sxm"), log, source.digest, "x")
    assert groups
    assert len(made.communication.points) == sum(len(test.rows) for test in log.tests)


def trace(source: SourceFile, *, read: Callable[[SourceFile], Trace] = read_kineto, peak: float | None = 1e12) -> None:
    """The parts of the ledger sum to the step, and names are printable."""
    made = read(source)
    ledger = ledger_of(made, peak)
    assert len(timeline_of(made)) > 0
    assert math.isclose(sum(seconds for _, seconds in ledger.entries()), ledger.step_s, rel_tol=1e-6, abs_tol=1e-9)
    assert not any(CONTROL.search(name) for name in (*made.activities.names, *made.activities.streams, made.device))


def tree(source: SourceFile, *, read: Callable[[SourceFile], MachineTree]) -> None:
    made = read(source)
    assert made.gpus > 0
    assert not any(CONTROL.search(name) for name, _ in made.cards)
    if made.gpus in (4, 8):
        with_links(load_profile(f"{made.gpus}x{'a100-sxm-80gb' if made.gpus == 4 else 'h100-sxm'}"), made, source.digest, "x")


def deepspeed(source: SourceFile) -> None:
    read = read_deepspeed(source)
    assert read.keys
    assert not any(CONTROL.search(text) for text in (*read.warnings, *read.harmless, *read.auto))


def tables_of(database: bytes) -> dict[str, dict[str, Any]]:
    """An SQLite file as a document, whose values can be replaced."""
    connection = sqlite3.connect(":memory:")
    connection.deserialize(database)
    found: dict[str, dict[str, Any]] = {}
    for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall():
        cursor = connection.execute(f"SELECT * FROM {name}")
        found[name] = {"columns": [column[0] for column in cursor.description], "rows": [list(row) for row in cursor]}
    return found


def database_of(tables: Any) -> bytes:
    """The other way round: whatever of the document SQLite takes."""
    refused = (sqlite3.Error, TypeError, KeyError, OverflowError, UnicodeEncodeError)
    connection = sqlite3.connect(":memory:")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        with contextlib.suppress(*refused):
            columns = ", ".join(f'"{column}"' for column in table["columns"])
            connection.execute(f'CREATE TABLE "{name}" ({columns})')
            for row in table["rows"]:
                with contextlib.suppress(*refused):
                    connection.execute(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(table["columns"]))})', row)
    connection.commit()
    is_empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return b"" if is_empty else connection.serialize()  # SQLite does not serialize one in memory that was never written to


def nsys_of_tables(path: Path) -> object:
    """Return the database that holds the tables of a document."""
    with contextlib.suppress(ValueError, RecursionError):
        trace(SourceFile(path, database_of(json.loads(path.read_bytes()))), read=read_nsys, peak=None)
    return path


def readers(folder: Path) -> list[Reader]:
    """Every kind of file that parsim reads, each with a whole one made by its own writer."""
    import numpy as np
    import torch

    from calibration.rounds.calibrate import refit
    from calibration.rounds.request import save_raw
    from parsim.app.config import load_config
    from parsim.app.foreign import import_file
    from parsim.app.functions import plan as plan_of
    from parsim.app.question import question_of
    from parsim.app.run_folder import RunFolder
    from parsim.costs.history import ValidationRecord, fingerprint, read_history
    from parsim.engines.scenario import load_scenario
    from parsim.execute.checkpoint.checkpoint import RankState, latest_checkpoint, load_state, save_checkpoint
    from parsim.execute.job import Job, RunSpec
    from parsim.execute.measurement import RankRecord
    from parsim.execute.streams import TaskTime
    from parsim.hardware.parts import instance_named, load_network, shipped_networks
    from parsim.hardware.profile import save_profile
    from parsim.model.catalogue.hugging_face import read_config
    from parsim.model.model import Model
    from parsim.model.spec import ModelSpec
    from parsim.plans.mesh import Mesh
    from parsim.plans.plan import Plan, Stage
    from parsim.timeline import Span, Timeline
    from tests.execute.test_bad_run import write_profile
    from tests.execute.test_calibrate import REQUEST, points_of, synthetic_raw
    from tests.hugging_face_configs import SMALL
    from tests.models import chain_model
    from tests.unit.import_samples import DEEPSPEED, LSTOPO, TOPO, gpu_trace, nccl_json, nccl_text, nsys_database, switched_topo
    from tests.unit.test_loading_prices import LOADING

    model = chain_model((1e6, 2e6, 3e6))
    names = tuple(component.name for component in model.components)
    plan = Plan(strategy="dp", mesh=Mesh(dp=2), stages=(Stage(components=names, ranks=(0, 1)),), global_batch=8)
    made = folder / "made"
    made.mkdir()
    model.save(made / "model.json")
    plan.save(made / "plan.json")
    spec = ModelSpec(name="mlp", args=(("width", 64),))
    run = RunSpec(
        name="run", model=spec, model_path="model.json", plan=plan, optimizer="sgd", learning_rate=0.1, dataset="digits"
    )
    Job(output="out", mode="train", runs=(run,), steps=3).save(made / "job.json")
    times = [[TaskTime(0, "compute", 1.0, 2.0), TaskTime(1, "dp", 2.0, 3.0)]]
    RankRecord(
        rank=0, rounds=[(1.0, 2.0, 1)], steps=times, losses=[0.5, None], cpu_s=[1.0], peak_bytes=100, memory_lines={"inputs": 1}
    ).save(made)
    Timeline.from_spans([Span(0, "r0.compute", 0.0, 1.0)], "measured").save(made / "timeline.json.gz")
    state = RankState(weights={"w": torch.ones(3)}, buffers={"b": torch.ones(1)}, rng={"cpu": torch.get_rng_state()})
    place = save_checkpoint(made / "checkpoints", 5, state, seed=1, rank=0, world_size=1)
    write_profile(made)
    profile = load_profile(str(made / "profile.json"))
    save_profile(profile, made / "profile.json")
    record = ValidationRecord(
        model="m", run="r", predicted_s=1.0, low_s=0.9, high_s=1.1, measured_s=1.0, when="2026", machine="none"
    )
    record = replace(record, profile=fingerprint(profile))

    lines = [{**asdict(record), "schema_version": 2, "measurement": str(number)} for number in range(12)]
    (made / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made / "RUN.toml").write_text(
        '[model]\nname = "mlp"\nargs = { width = 64 }\n[cluster]\nprofile = "dgx1-v100-32gb"\ndevices = 4\n'
        '[training]\nglobal_batch = 64\nsteps = 3\n[plan]\nstrategy = "dp"\nzero_stage = 1\nmesh = { dp = 4 }\n'
    )
    (made / "prices").mkdir()
    price = {"usd_per_hour": 40.0, "region": "us-east-1", "as_of": "gpuhunt, 2026-11-28"}
    (made / "prices" / "clouds.json").write_text(json.dumps({"p5.48xlarge": price, "p4d.24xlarge": price}))
    (made / "scenario.toml").write_text(
        "[[stragglers]]\nrank = 0\nfactor = 1.5\n[jitter]\ncompute_sigma = 0.1\n"
        "[run]\nepochs = 2\nsamples_per_epoch = 1000\n[failures]\nrank_mtbf_s = 1000.0\n"
    )
    network = Path("hardware_profiles/networks") / f"{shipped_networks()[0]}.json"
    (made / "network.json").write_bytes(network.read_bytes())
    (made / "loading.json").write_text(json.dumps(LOADING.to_dict()))
    (made / "nccl.txt").write_text(nccl_text(sizes=(2**10, 2**16, 2**22, 2**28)))
    (made / "nccl.json").write_text(nccl_json(sizes=(2**10, 2**16, 2**22, 2**28)))
    (made / "trace.json").write_text(json.dumps(gpu_trace()))
    (made / "trace.json.gz").write_bytes(gzip.compress(json.dumps(gpu_trace()).encode(), mtime=0))
    on_a_cpu = [{**event, "cat": "cpu_op"} for event in gpu_trace()["traceEvents"] if event.get("cat")]
    (made / "cpu_trace.json").write_text(json.dumps({"traceEvents": on_a_cpu}))
    (made / "pair.txt").write_text(nccl_text(2, program="sendrecv", redop="none", sizes=(2**10, 2**16, 2**22, 2**28)))
    (made / "topo.txt").write_text(TOPO)
    (made / "switches.txt").write_text(switched_topo(8))
    (made / "nsys_tables.json").write_text(json.dumps(tables_of(nsys_database(gpus=2, marked=False))))
    (made / "lstopo.xml").write_text(LSTOPO)
    (made / "nsys.sqlite").write_bytes(nsys_database())
    (made / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    (made / "config.json").write_text(json.dumps(next(iter(SMALL.values()))))

    for name, sample in (("megatron.sh", MEGATRON), ("nemo.yaml", NEMO), ("torchtitan.toml", TORCHTITAN)):
        (made / name).write_text(sample)
    save_raw(points_of(synthetic_raw(REQUEST)), made / "p.raw.json.gz")

    def checkpoint(path: Path) -> object:
        found = latest_checkpoint(path.parent.parent)
        return None if found is None else load_state(found)

    def entry(name: str, read: Callable[[Path], object], file: str | None = None) -> Reader:
        return Reader(name, (made / (file or name)).read_bytes(), file or name, read)

    def planned(model: Path | Model) -> object:
        """What crashes only once the sizes are used."""
        is_recipe = isinstance(model, Path) and model.suffix != ".json"  # which says its mesh itself
        asked = str(model) if isinstance(model, Path) else model
        return plan_of(asked, "8xh100-sxm", global_batch=8, overrides=[] if is_recipe else ["plan.strategy=dp"])

    expected = json.loads((FRAMEWORKS / "expected.json").read_text())

    def of_framework(name: str) -> Reader:
        """A file of tests/frameworks, planned as it is but for its layers, and with what it lacks."""
        says = expected[name]
        nodes = max(says.get("processes", 8), says.get("tp", 1) * says.get("pp", 1)) // 8 or 1
        layers = max(4, says.get("pp", 1) * says.get("chunks", 1))
        given = [] if says.get("model") in SHIPPED else [f"model.args.layers={layers}"]
        given += ['model.name="gpt2-medium"'] if says.get("model") == "" or "model.name" in says.get("missing", {}) else []
        given += ['cluster.network="infiniband-400g"'] if nodes > 1 else []
        given += ["model.args.seq=4096"] if "model.args.seq" in says.get("missing", {}) else []

        def read(path: Path) -> object:
            return plan_of(path, f"{8 * nodes}xh100-sxm", global_batch=BATCHES.get(name, 128), overrides=given)

        return Reader(f"{name}, planned", (FRAMEWORKS / name).read_bytes(), name, read)

    def on_machine(machine: Path | str, **settings: object) -> object:
        """A small plan on what a file describes."""
        given = {"plan.strategy": "dp", "plan.zero_stage": 0, **{key.replace("__", "."): own for key, own in settings.items()}}
        return plan_of("mlp", machine, global_batch=64, settings=given)

    def imported(path: Path, kind: str) -> object:
        """A machine of another tool, written as a profile and planned on."""
        into = path.with_name("imported.json")
        into.unlink(missing_ok=True)
        import_file(path, cluster="4xa100-sxm-80gb", kind=kind, into=into)
        return on_machine(into)

    def with_history(path: Path) -> object:
        """Intervals by the records of a history."""
        return on_machine(made / "profile.json", cluster__history=str(path))

    def priced(path: Path) -> object:
        """Prices that `parsim profile prices --refresh` keeps, where parsim looks for them."""
        with mock.patch.dict("os.environ", {HOME_VARIABLE: str(path.parent.parent)}):
            return question_of("mlp", cluster="p5.48xlarge", global_batch=64), instance_named("p5.48xlarge")

    step = f"checkpoints/{place.name}"
    kept = folder / "cases" / step
    kept.mkdir(parents=True)
    for path in place.iterdir():
        (kept / path.name).write_bytes(path.read_bytes())
    for name in ("rank0.json", "rank0.npy"):
        (folder / "cases" / name).write_bytes((made / name).read_bytes())
    assert np  # loaded before memory is limited
    return [
        entry("plan.json", Plan.load),
        entry("model.json", Model.load),
        entry("job.json", Job.load),
        entry("manifest", checkpoint, f"{step}/rank-0000.json"),
        entry("tensors", checkpoint, f"{step}/rank-0000.pt"),
        entry("timeline.json.gz", Timeline.load),
        entry("history.jsonl", lambda path: read_history(path, profile)),
        entry("loading.json", lambda path: RunFolder(path.parent).read_loading()),
        entry("profile.json", lambda path: load_profile(str(path))),
        entry("network.json", lambda path: load_network(str(path))),
        entry("RUN.toml", load_config),
        entry("scenario.toml", load_scenario),
        entry("config.json", lambda path: read_config(ModelSpec(name=str(path)))),
        entry("rank0.json", lambda path: RankRecord.load(path.parent, 0)),
        entry("nccl.txt", of_another_tool(nccl)),
        entry("nccl.json", of_another_tool(nccl)),
        entry("pair.txt", of_another_tool(nccl)),
        entry("trace.json", of_another_tool(trace)),
        entry("trace.json.gz", of_another_tool(trace)),
        entry("cpu_trace.json", of_another_tool(trace)),
        entry("topo.txt", of_another_tool(partial(tree, read=read_topo_matrix), cluster="4xa100-sxm-80gb")),
        entry("switches.txt", of_another_tool(partial(tree, read=read_topo_matrix), cluster="8xh100-sxm")),
        entry("lstopo.xml", of_another_tool(partial(tree, read=read_lstopo), cluster="4xa100-sxm-80gb", kind="lstopo")),
        entry("nsys.sqlite", of_another_tool(partial(trace, read=read_nsys, peak=None), kind="nsys")),
        entry("nsys_tables.json", nsys_of_tables),
        entry("deepspeed.json", of_another_tool(deepspeed)),
        entry("rank0.npy", lambda path: RankRecord.load(path.parent, 0)),
        entry("megatron.sh, planned", planned, "megatron.sh"),
        entry("nemo.yaml, planned", planned, "nemo.yaml"),
        entry("torchtitan.toml, planned", planned, "torchtitan.toml"),
        entry("model.json, planned", lambda path: planned(Model.load(path)), "model.json"),
        entry("config.json, planned", planned, "config.json"),
        entry("RUN.toml, planned", lambda path: plan_of(path), "RUN.toml"),
        entry("profile.json, planned", on_machine, "profile.json"),
        entry(
            "history.jsonl, planned",
            lambda path: on_machine(made / "profile.json", cluster__history=str(path)),
            "history.jsonl",
        ),
        entry("network.json, planned", lambda path: on_machine("2xp5.48xlarge", cluster__network=str(path)), "network.json"),
        entry("topo.txt, planned", lambda path: imported(path, "topo"), "topo.txt"),
        entry("lstopo.xml, planned", lambda path: imported(path, "lstopo"), "lstopo.xml"),
        entry("prices/clouds.json, planned", priced, "prices/clouds.json"),
        *(of_framework(name) for name in sorted(expected.keys() - {*NOT_PLANNED}) if "refused" not in expected[name]),
        entry("p.raw.json.gz, fitted", lambda path: refit(path.with_name("p.json")), "p.raw.json.gz"),
    ]


def fuzz(
    reader: Reader, folder: Path, count: int, seed: int, until_s: float = float("inf"), first: int = 0
) -> tuple[int, dict[int, str]]:
    """How many cases were tried from number `first` on, and what failed, by number."""
    failures = {}
    path = folder / reader.file
    whole = reader.sample
    tried = 0
    for number in range(first, first + count):
        if time.monotonic() > until_s:
            break
        tried += 1
        content = damaged(whole, random.Random(f"{reader.name}/{seed}/{number}"))
        if problem := failure_of(reader, folder, content):
            failures[number] = f"{reader.name}, case {number}: {problem}"
            if len(failures) >= 20:
                break
    path.write_bytes(whole)
    return tried, failures


@dataclass(slots=True)
class Tally:
    """Of one reader. Attributes: tried: cases. failing: their numbers. seconds: of the processor, together."""

    tried: int = 0
    failing: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ms(self) -> float:
        """Milliseconds per case."""
        return 1e3 * self.seconds / max(self.tried, 1)

    def add(self, line: dict[str, Any]) -> None:
        """What a line of the record tells."""
        self.tried += line["tried"]
        self.seconds += line["seconds"]
        self.failing = [number for number in self.failing if number not in line["mended"]] + line["failing"]


def recorded(path: Path | None, seed: int | None = None) -> dict[str, Tally]:
    """What a file of `--record` holds by reader, of one seed or of all."""
    found: dict[str, Tally] = {}
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    for line in map(json.loads, lines):
        if seed in (None, line["seed"]):
            found.setdefault(line["reader"], Tally()).add(line)
    return found


def table(found: dict[str, Tally]) -> str:
    """Markdown: one row per reader."""
    rows = [f"| `{name}` | {own.tried:,} | {len(own.failing)} | {own.ms:.2f} |" for name, own in sorted(found.items())]
    return "\n".join(["| file | damaged files | failed | ms each |", "|---|---:|---:|---:|", *rows])


def play(every: Sequence[Reader], folder: Path, asked: argparse.Namespace) -> dict[str, Tally]:
    """So many cases of every reader, in portions; each is added to `asked.record`."""
    until_s = time.monotonic() + asked.seconds
    before = recorded(asked.record, asked.seed)
    found = {reader.name: before.get(reader.name, Tally()) for reader in every}

    def note(reader: Reader, **told: Any) -> None:
        line = {"reader": reader.name, "seed": asked.seed, "tried": 0, "seconds": 0.0, "failing": [], "mended": [], **told}
        found[reader.name].add(line)
        if asked.record is not None:
            with asked.record.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for reader in every:
        again = [number for number in found[reader.name].failing if not fuzz(reader, folder, 1, asked.seed, first=number)[1]]
        if again:
            note(reader, mended=again)
    for goal in (min(PROBE, asked.count), asked.count):
        for reader in sorted(every, key=lambda reader: found[reader.name].ms):
            while found[reader.name].tried < goal and time.monotonic() < until_s:
                first, begin_s = found[reader.name].tried, time.process_time()
                tried, failures = fuzz(reader, folder, min(PORTION, goal - first), asked.seed, until_s, first)
                for text in failures.values():
                    print(text, file=sys.stderr, flush=True)
                note(reader, tried=tried, seconds=round(time.process_time() - begin_s, 3), failing=list(failures))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="cases of each reader")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the reader of this name")
    parser.add_argument("--record", type=Path, help="go on where this file ends, and add to it")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="parsim-fuzz-") as name:
        folder = Path(name)
        every = [reader for reader in readers(folder) if asked.only in (None, reader.name)]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, resource.RLIM_INFINITY))
        found = play(every, folder / "cases", asked)
    print(table(found if asked.record is None else recorded(asked.record)))
    return int(any(own.failing for own in found.values()))


assert tomllib  # the TOML reader is loaded before memory is limited

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
