"""Do two trees of parsim give the same answers? Asks over 300 questions of all kinds, records the answers, and compares.

    python tools/compare_answers.py record [OUT]      ask the tree that this file is in; write its answers
    python tools/compare_answers.py compare [OUT]     ask again and list the differences; exit 1 if there are any
    python tools/compare_answers.py list              the questions: `tools/questions.txt`, expanded

OUT is `tools/answers.json.gz` unless named: the answers that were committed. `--quick` asks about 60 questions, `--kind plan`
those of one kind (repeatable), `--only TEXT` those that contain TEXT, `--jobs N` sets the processes (2), `--tree DIR` asks
another checkout, `--against FILE` compares two recorded files without asking, `--times` prints the slowest questions.

Questions go through the command line and the public functions, so they outlive changes of the modules below. Equal means: the
same text, the same whole numbers, and floats within a relative difference of `--tolerance` (1e-12: sums may be taken in another
order; 0 asks for equal bits). Timings, versions and folders are not part of an answer. Of an error the class and the run-file
keys that its message names are compared, not its sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUESTIONS = HERE / "questions.txt"
ANSWERS = HERE / "answers.json.gz"
TOLERANCE = 1e-12
NOT_COMPARED = {
    "taken_s",
    "planning_s",
    "elapsed_s",
    "version",
    "parsim_version",
    "python",
    "created",
    "date",
    "folder",
    "path",
}
"""Keys of answers that tell when, where and by which version they were given."""
KEY_OF_RUN_FILE = re.compile(r"\b(?:model|cluster|training|plan|run|jitter|failures|checkpoints|device)\.[a-z_]+(?:\.[a-z_]+)*")
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]+")
ALTERNATIVES = re.compile(r"<([^<>]*\|[^<>]*)>")
SETTING = re.compile(r"(?:model|cluster|training|plan)\.[\w.]+=")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question: a command line, its kind, and whether `--quick` asks it."""

    line: str
    kind: str
    quick: bool


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    """The lines of the file with their abbreviations and alternatives expanded, in order. Raises ValueError: a line comes
    twice."""
    abbreviations: dict[str, str] = {}
    questions: list[Question] = []
    kind = ""

    def expanded(text: str) -> str:
        return " ".join(abbreviations.get(word, word) for word in text.split(" "))

    for text in path.read_text(encoding="utf-8").splitlines():
        if not text or text.startswith("#"):
            continue
        if text.startswith("["):
            kind = text.strip("[]")
        elif not kind:
            name, _, meaning = text.partition(" = ")
            abbreviations[name] = expanded(meaning)
        else:
            parts = ALTERNATIVES.split(expanded(text.removeprefix("* ")))  # text, alternatives, text, alternatives, ..., text
            choices = [part.split("|") if number % 2 else [part] for number, part in enumerate(parts)]
            for number, choice in enumerate(itertools.product(*choices)):
                questions.append(Question(line="".join(choice), kind=kind, quick=text.startswith("* ") and number == 0))
    twice = [line for line, times in Counter(question.line for question in questions).items() if times > 1]
    if twice:
        raise ValueError(f"{path.name} asks twice: {twice}")
    return questions


# ------------------------------------------------------------------------------------------- the files that questions name


def _nccl_log() -> str:
    """An all_reduce of eight H100 with 25 us and 150 GB/s."""
    devices = [
        f"#  Rank {rank:2d} Group  0 Pid {4000 + rank:6d} on     node-a device {rank:2d} [0000:{rank:02x}:00]"
        for rank in range(8)
    ]
    lines = [
        "# Collective test starting: all_reduce_perf",
        "# Using devices",
        *(f"{line} NVIDIA H100 80GB HBM3" for line in devices),
    ]
    lines.append("#  size  count  type  redop  root  time   algbw   busbw #wrong     time   algbw   busbw #wrong")
    for size in (4**power for power in range(5, 16)):
        us = (25e-6 + size / 150e9) * 1e6
        half = f"{us:9.2f} {size / us / 1e3:7.2f} {size / us / 1e3 * 1.75:7.2f}      0"
        lines.append(f"{size:12d} {size // 4:12d}     float     sum      -1  {half}  {half}")
    return "\n".join([*lines, "# Avg bus bandwidth    : 70.7", ""])


TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tSYS\tSYS\tPXB\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tPXB\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\tSYS\tNODE\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \tSYS\tNODE\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tNODE\tNODE\tSYS\t X
"""


def _lstopo() -> str:
    """Four GPUs on two sockets, as hwloc 2 writes them."""

    def gpu(socket: int, card: int) -> str:
        return (
            f'<object type="PCIDev" gp_index="{200 + 10 * socket + card}" pci_busid="0000:{socket}{card + 1}:00.0" '
            'pci_type="0302 [10de:20b2] [10de:1463] a1">'
            f'<object type="OSDev" gp_index="{300 + 2 * socket + card}" name="nvml{2 * socket + card}" subtype="NVML" '
            'osdev_type="1"><info name="GPUModel" value="NVIDIA A100-SXM4-80GB"/></object></object>'
        )

    def socket(number: int) -> str:
        return (
            f'<object type="Package" os_index="{number}" gp_index="{100 + number}">'
            f'<object type="NUMANode" os_index="{number}" gp_index="{110 + number}" local_memory="1000"/>'
            f'<object type="Bridge" gp_index="{120 + number}" bridge_type="0-1" depth="0" '
            f'bridge_pci="0000:[{number}0-{number}f]">'
            f"{gpu(number, 0)}{gpu(number, 1)}</object></object>"
        )

    head = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">'
    machine = '<object type="Machine" os_index="0" gp_index="1"><info name="Backend" value="Linux"/>'
    return f"{head}{machine}{socket(0)}{socket(1)}</object></topology>\n"


def _trace() -> str:
    """Two steps of 1 ms on a GPU: a product, a norm beside an all_reduce, a copy, an update."""
    events: list[dict[str, object]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]

    def add(category: str, name: str, ts: float, dur: float, tid: object = 1, **args: object) -> None:
        events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    for step in range(2):
        at, key = 5_000_000.0 + 1000 * step, 10 * (step + 1)
        shapes = {"Input type": ["c10::BFloat16", "c10::BFloat16"], "Input Dims": [[1024, 1024], [1024, 1024]]}
        add("user_annotation", f"ProfilerStep#{step}", at, 1000)
        add("cpu_op", "aten::mm", at - 50, 20, **{"External id": key, **shapes})
        add("kernel", "gemm", at, 400, tid=7, stream=7, correlation=key, **{"External id": key})
        add("kernel", "layer_norm", at + 400, 100, tid=7, stream=7, correlation=key + 1)
        add("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 400, 250, tid=20, stream=20, correlation=key + 2)
        add("gpu_memcpy", "Memcpy HtoD", at + 650, 50, tid=7, stream=7, correlation=key + 3)
        add("cuda_runtime", "cudaLaunchKernel", at + 790, 10, correlation=key + 4)
        add("kernel", "adamw", at + 900, 100, tid=7, stream=7, correlation=key + 4)
    machine = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    ranks = {"distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}}
    return json.dumps({"schemaVersion": 1, **machine, **ranks, "traceEvents": events})


def _broken_profile(tree: Path, keys: Sequence[str], value: object) -> str:
    """A shipped profile with another value at a path of keys."""
    document = json.loads((tree / "hardware_profiles" / "dgx1-v100-32gb.json").read_text("utf-8"))
    table = document
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    return json.dumps(document)


DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "gradient_clipping": 1.0,
    "my_own_key": 3,
}
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50257 --micro-batch-size 2 --global-batch-size 64 "
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16 "
    "--recompute-activations --use-distributed-optimizer --sequence-parallel\n"
)
RUN = """[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
"""
MIXED = """[model]
name = "gpt2"
[cluster]
network = "infiniband-400g"
[[cluster.group]]
gpu = "h100-sxm"
nodes = 1
[[cluster.group]]
gpu = "a100-sxm-80gb"
nodes = 1
[training]
global_batch = 32
[plan]
strategy = "dp"
"""
WHOLE_RUN = """seed = 7
[failures]
rank_mtbf_s = 400000.0
restart_s = 300.0
[checkpoints]
interval_s = 1800.0
write_bytes_per_s = 2e8
[run]
samples_per_epoch = 1281167
epochs = 3
[device]
price_per_hour = 3.06
busy_w = 300.0
idle_w = 50.0
"""
SCENARIOS = {
    "nothing": "",
    "jitter": "seed = 3\n[jitter]\ncompute_sigma = 0.05\ncommunication_sigma = 0.1\n",
    "gamma": 'seed = 4\n[jitter]\ndistribution = "gamma"\ncompute_sigma = 0.2\n',
    "straggler": "[[stragglers]]\nrank = 1\nfactor = 1.5\n",
    "rank-99": "[[stragglers]]\nrank = 99\nfactor = 2.0\n",
    "slow-link": 'share_links = true\n[[links]]\nbetween = ["gpu0", "gpu3"]\nbandwidth_factor = 0.1\n',
    "all-links": "share_links = true\n[[links]]\nbandwidth_factor = 0.5\n",
    "asynchronous": "[asynchronous]\nmerge_s = 0.01\n",
    "whole-run": WHOLE_RUN,
    "whole-run-nodes": WHOLE_RUN.replace("rank_mtbf_s", "node_mtbf_s") + "[jitter]\ncompute_sigma = 0.05\n",
    "whole-run-straggler": WHOLE_RUN + "[[stragglers]]\nrank = 2\nfactor = 1.3\nfrom_s = 100.0\nuntil_s = 5000.0\n",
    "whole-run-once": WHOLE_RUN.replace("rank_mtbf_s = 400000.0", "at = [{ at_s = 500.0, rank = 1 }]"),
}


def files_of(tree: Path) -> Mapping[str, str]:
    """Name -> content of every file that a question may name, written into the folder where it is asked."""
    device = ("device_types", "V100-SXM2")
    return {
        "RUN.toml": RUN,
        "mixed.toml": MIXED,
        "broken.toml": "[model\nname = 3\n",
        "nccl.txt": _nccl_log(),
        "topo.txt": TOPOLOGY,
        "machine.xml": _lstopo(),
        "trace.json": _trace(),
        "ds.json": json.dumps(DEEPSPEED),
        "pretrain.sh": MEGATRON,
        "nothing.txt": "hello\nworld\n",
        "broken-peak.json": _broken_profile(tree, (*device, "peak_flop_per_s", "fp32", "value"), 0),
        "broken-link.json": _broken_profile(tree, ("link_kinds", "nvlink", "bandwidth_bytes_per_s", "value"), 25),
        "broken-memory.json": _broken_profile(tree, (*device, "memory_bytes", "value"), 32),
        "broken-key.json": _broken_profile(tree, ("devcies",), 1),
        **{f"{name}.toml": text for name, text in SCENARIOS.items()},
    }


# ------------------------------------------------------------------------------------------------------------------ asking


def _predicted(words: Sequence[str]) -> Any:
    """The prediction of a question as `parsim simulate` takes it, from Python."""
    import parsim

    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("model")
    parser.add_argument("--on")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args(list(words))
    return parsim.simulate(given.model, cluster=given.on, global_batch=given.batch, seq=given.seq, overrides=given.set)


def _memory(words: Sequence[str], tree: Path) -> Any:
    """Memory line by line and rank by rank, and the timeline in short."""
    predicted = _predicted(words)
    timeline = predicted.timeline()
    streams = timeline.groupby(["rank", "stream", "kind"], dropna=False).duration_s.agg(["count", "sum"]).reset_index()
    return {
        "plan": str(predicted.plan.summary()),
        "memory": predicted.memory().to_dict("list"),
        "breakdown": predicted.breakdown().to_dict("list"),
        "streams": streams.to_dict("list"),
        "end_s": float(timeline.end_s.max()),
        "first": timeline.head(40).to_dict("list"),
        "critical_path": predicted.critical_path(),
        "fits": predicted.fits,
        "fit_probability": predicted.fit_probability,
    }


def _explain(words: Sequence[str], tree: Path) -> Any:
    return str(_predicted(words).explain())


def _export(words: Sequence[str], tree: Path) -> Any:
    """The files of an export, and what its format leaves out."""
    target = Path(f"exported-{words[0]}")
    exported = _predicted(words[1:]).export(words[0], out=target)
    return {"left_out": exported.left_out, "files": _contents(target)}


ROW = ("hardware", "gpus", "model", "precision", "global_batch", "micro_batch", "seq", "tp", "pp", "dp", "recompute", "unit")
MORE_OF_ROW = ("id", "source", "params", "layers", "hidden", "heads", "cp", "ep", "vpp", "zero_stage", "value", "notes")


def _published(words: Sequence[str], tree: Path) -> Any:
    """A published run as its source states it, priced by `experiments/published` without fitted factors."""
    folder = str(tree / "experiments" / "published")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from predict import predict  # type: ignore[import-not-found]
    from rows import read_rows  # type: ignore[import-not-found]

    with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*MORE_OF_ROW, *ROW], restval="")
        writer.writeheader()
        writer.writerow({"id": f"{words[0]}-x-1", **dict(zip(ROW, words[1].split(","), strict=True))})
    predicted = predict(read_rows(Path("rows.csv"))[0], raw=True)
    numbers = {name: getattr(predicted, name, None) for name in ("step_s", "value", "p05", "p95", "fit_probability")}
    answer = getattr(predicted, "answer", None)
    return {"why": predicted.why, **numbers, "peak_bytes": None if answer is None else answer.peak_bytes}


CALLS: Mapping[str, Callable[[Sequence[str], Path], Any]] = {
    "memory": _memory,
    "explain": _explain,
    "export-of": _export,
    "published": _published,
}


def _command(words: Sequence[str]) -> Any:
    """What `parsim WORDS` prints: its JSON document, or its text."""
    import click
    import typer

    from parsim.cli import build

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            status = typer.main.get_command(build())(list(words), prog_name="parsim", standalone_mode=False)
        except click.exceptions.Exit as ending:
            status = ending.exit_code
        except SystemExit as ending:
            status = ending.code
        except click.ClickException as error:
            return {"error": type(error).__name__, "keys": sorted(set(OPTION.findall(error.format_message())))}
    try:
        document = json.loads(printed.getvalue())
    except json.JSONDecodeError:
        document = printed.getvalue()
    return {"status": status, "printed": document} if status else document


def _contents(path: Path) -> Any:
    """What a file or a folder holds: parsed if it is JSON, a digest if it is no text."""
    if path.is_dir():
        return {str(file.relative_to(path)): _contents(file) for file in sorted(path.rglob("*")) if file.is_file()}
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _error(error: Exception) -> Any:
    """Class and run-file keys of an error that a user caused; the sentence of any other, which is a fault."""
    from parsim.errors import ParsimError

    if isinstance(error, ParsimError):
        return {"error": type(error).__name__, "keys": sorted(set(KEY_OF_RUN_FILE.findall(str(error))))[:4]}
    if isinstance(error, OSError):
        return {"error": type(error).__name__}
    return {"fault": f"{type(error).__name__}: {error}"[:300]}


def _cleaned(answer: Any, folders: Mapping[str, str]) -> Any:
    """An answer in the types of JSON, without what tells when, where and by which version it was given."""
    if isinstance(answer, Mapping):
        return {str(key): _cleaned(value, folders) for key, value in answer.items() if str(key) not in NOT_COMPARED}
    if isinstance(answer, list | tuple):
        return [_cleaned(value, folders) for value in answer]
    if hasattr(answer, "item"):  # a number of numpy
        answer = answer.item()
    if answer is None or isinstance(answer, bool | int):
        return answer
    if isinstance(answer, float) and math.isfinite(answer):
        return answer
    text = str(answer)
    for folder, word in folders.items():
        text = text.replace(folder, word)
    return text


def ask(question: Question, tree: Path) -> tuple[str, Any, float]:
    """The question's line, its answer, and the CPU seconds it took. An error is an answer."""
    began_s = time.process_time()
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="compare-answers-") as folder:
        os.chdir(folder)
        try:
            words: list[str] = []
            for word in shlex.split(question.line.replace("TREE", str(tree))):
                words += ["--set", word] if SETTING.match(word) and words[-1:] not in (["--set"], ["--over"]) else [word]
            for name, content in files_of(tree).items():
                if name in question.line:
                    Path(name).write_text(content, encoding="utf-8")
            answer = CALLS[words[0]](words[1:], tree) if words[0] in CALLS else _command(words)
            into = next((after for option, after in itertools.pairwise(words) if option in ("--into", "--out")), None)
            if into is not None and words[0] in ("import", "profile"):
                answer = {"printed": answer, "written": _contents(Path(into))}
        except Exception as error:
            answer = _error(error)
            if "fault" in answer:
                print(f"{question.line}\n{traceback.format_exc()}", file=sys.stderr)
        finally:
            os.chdir(before)
        cleaned = _cleaned(answer, {folder: "FOLDER", str(tree): "TREE"})
    return question.line, cleaned, time.process_time() - began_s


def _begin(tree: str) -> None:
    sys.path.insert(0, tree)
    os.environ["PARSIM_HOME"] = tempfile.mkdtemp(prefix="compare-answers-home-")
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "140"


def _ask_quietly(question: Question, tree: str) -> tuple[str, Any, float]:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        return ask(question, Path(tree))


def ask_all(questions: Sequence[Question], tree: Path, jobs: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Answers and CPU seconds by the lines of the questions, asked in `jobs` fresh processes of one thread each."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["PYTHONPATH"] = str(tree)
    answers: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    left = list(questions)
    while left:  # once, unless a process is killed: then again without the questions that were answered
        alone = len(left) < len(questions)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1 if alone else jobs, context, initializer=_begin, initargs=(str(tree),)) as pool:
            running = {pool.submit(_ask_quietly, question, str(tree)): question for question in left}
            for future in as_completed(running):
                try:
                    line, answers[line], seconds[line] = future.result()
                except BrokenProcessPool:
                    continue
                if len(answers) % 50 == 0 or len(answers) == len(questions):
                    print(f"{len(answers)} of {len(questions)} answered", file=sys.stderr)
        unanswered = [question for question in left if question.line not in answers]
        if alone and len(unanswered) == len(left):
            answers[left[0].line], seconds[left[0].line] = {"fault": "the process was killed"}, 0.0
            unanswered = left[1:]
        left = unanswered
    return {question.line: answers[question.line] for question in questions}, seconds


# --------------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place in one answer."""

    line: str
    place: str
    before: Any
    after: Any

    def __str__(self) -> str:
        both = f"{_short(self.before)} -> {_short(self.after)}"
        if _is_number(self.before) and _is_number(self.after) and self.before != self.after:
            both += f"  ({(self.after - self.before) / max(abs(self.before), abs(self.after)):+.1e})"
        return f"{self.place or '(all)'}: {both}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any, width: int = 70) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def differences(line: str, before: Any, after: Any, tolerance: float, place: str = "") -> Iterator[Difference]:
    """Where two answers to a question differ by more than a relative `tolerance` of floats."""
    if _is_number(before) and _is_number(after) and (isinstance(before, float) or isinstance(after, float)):
        if abs(after - before) > tolerance * max(abs(before), abs(after)):
            yield Difference(line=line, place=place, before=before, after=after)
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(line, before.get(key, "(absent)"), after.get(key, "(absent)"), tolerance, f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield Difference(line=line, place=f"{place} length", before=len(before), after=len(after))
        for number, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(line, one, other, tolerance, f"{place}[{number}]")
    elif isinstance(before, str) and isinstance(after, str) and "\n" in before and before != after:
        yield from differences(line, before.splitlines(), after.splitlines(), tolerance, f"{place} line ")
    elif before != after or type(before) is not type(after):
        yield Difference(line=line, place=place, before=before, after=after)


def report(found: Sequence[Difference], questions: Sequence[Question], most: int) -> str:
    """The differences, at most `most` of each question, and a count by kind."""
    by_line: dict[str, list[Difference]] = {}
    for difference in found:
        by_line.setdefault(difference.line, []).append(difference)
    lines: list[str] = []
    for line, some in by_line.items():
        lines += [f"{line}: {len(some)} differences", *(f"  {difference}" for difference in some[:most])]
    asked = Counter(question.kind for question in questions)
    differ = Counter(question.kind for question in questions if question.line in by_line)
    lines += ["", "kind        asked  differ", *(f"{kind:10} {count:6} {differ[kind]:7}" for kind, count in asked.items())]
    return "\n".join([*lines, f"{'all':10} {len(questions):6} {len(by_line):7}"])


def read(path: Path) -> dict[str, Any]:
    """Recorded answers by the lines of their questions."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        answers: dict[str, Any] = json.load(file)
    return answers


def write(path: Path, answers: Mapping[str, Any]) -> None:
    """Answers as one compressed JSON document; equal answers give equal bytes."""
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=9, mtime=0) as file:
        file.write(json.dumps(answers, separators=(",", ":")).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    every = read_questions()
    kinds = tuple(dict.fromkeys(question.kind for question in every))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare", "list"))
    parser.add_argument("out", type=Path, nargs="?", default=ANSWERS)
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="the checkout that is asked")
    parser.add_argument("--against", type=Path, help="compare OUT with these recorded answers and ask nothing")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", action="append", choices=kinds, default=[])
    parser.add_argument("--only", default="", help="questions whose line contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative difference of floats that counts as equal")
    parser.add_argument("--most", type=int, default=6, help="differences shown of each question")
    parser.add_argument("--times", action="store_true", help="print the slowest questions")
    options = parser.parse_args(arguments)
    questions = [
        question
        for question in every
        if (question.quick or not options.quick) and options.only in question.line and question.kind in (options.kind or kinds)
    ]
    if options.action == "list":
        print("\n".join(f"{question.kind:10} {'quick' if question.quick else '':6} {question.line}" for question in questions))
        print(f"{len(questions)} questions")
        return 0
    if options.against is None:
        answers, seconds = ask_all(questions, options.tree.resolve(), options.jobs)
    else:
        answers, seconds = read(options.against), {}
    if options.times:
        slowest = sorted(seconds.items(), key=lambda entry: -entry[1])[:20]
        print("\n".join(f"{taken_s:7.1f} s  {line}" for line, taken_s in slowest), file=sys.stderr)
        print(f"{sum(seconds.values()):7.1f} CPU seconds together", file=sys.stderr)
    for line, answer in answers.items():
        if isinstance(answer, dict) and "fault" in answer:
            print(f"not answered: {line}: {answer['fault']}", file=sys.stderr)
    if options.action == "record":
        write(options.out, answers)
        print(f"{len(answers)} answers in {options.out}")
        return 0
    recorded = read(options.out)
    both = [question for question in questions if question.line in recorded and question.line in answers]
    found = [
        difference
        for question in both
        for difference in differences(question.line, recorded[question.line], answers[question.line], options.tolerance)
    ]
    print(report(found, both, options.most))
    for question in questions:
        if question.line not in recorded:
            print(f"not recorded: {question.line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
