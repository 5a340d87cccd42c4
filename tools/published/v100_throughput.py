"""Whole-model training rows of one V100: those that measure PyTorch, the predictions for them, and the efficiency.

`throughput.csv` is read whole. A row is a case's if it was measured with PyTorch (Megatron-LM and NVIDIA's examples are) on
ResNet-50, BERT-base or GPT. It must be in samples per second, at a stated batch, and not held back by data loading. Every other
row is listed with the reason it is left out. Of several rows for one case the median stands.

The programs that were measured, as their scripts say (github Oneflow-Inc/DLPerf and NVIDIA/DeepLearningExamples):
    ResNet-50  v1.5 on 224 x 224, SGD with momentum; channels last under mixed precision alone.
    BERT-base  sequence length 128, dropout 0.1, vocabulary padded to a multiple of 8 (30,528), FusedAdam (priced as torch's
               foreach AdamW, some 7 ms longer), apex DDP with message_size = 250,000,000: one bucket after the backward.
    GPT        sequence length 2048, dropout 0.1, fused masked softmax, FusedAdam, and `--checkpoint-activations`: the forward
               of every layer runs twice.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from parsim.costs.communication.measured import rounded
from parsim.errors import DataError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.profile import Profile, SourceEntry
from parsim.hardware.records import Efficiency
from parsim.model.catalogue.frameworks import FRAMEWORKS, ConvolutionSoftware, run_by
from parsim.model.component import LOSS
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.work import Compute, Phase


def read_table(data_dir: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table, by column. Raises DataError: the folder holds no such file."""
    path = data_dir / name
    if not path.is_file():
        raise DataError(f"no {path}; --data must name the folder that holds {name}")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


EFFICIENCY = "fit-efficiency"
PRECISIONS = {"fp32": "fp32", "mixed/fp16": "amp_fp16", "mixed/fp16 (AMP)": "amp_fp16"}
LOADER_BOUND = {
    "thr-dlperf-0037": "apparently loader-bound: 803 images/s, where the same program with a faster loader reaches 1,200",
    "thr-dlperf-0272": "apparently loader-bound: the same 803 images/s from another table",
    "thr-dlperf-0277": "apparently loader-bound: 828 images/s",
}
APEX_DDP_BYTES = 4 * 250_000_000
HEADS = {768: 12, 1536: 16}
"""Attention heads of the GPT cases by hidden size, from DLPerf's scripts."""


PLAIN = ConvolutionSoftware()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTraining:
    """What was measured: the model, its optimizer, the bucket of its gradients, the components whose forward runs twice, and
    how convolutions run."""

    spec: ModelSpec
    optimizer: str
    convolution: ConvolutionSoftware = PLAIN
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    recomputed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One usable row; `number` is that of its id."""

    id: str
    case: tuple[str, str, int, int]
    samples_per_s: float

    @property
    def number(self) -> int:
        return int(self.id.rsplit("-", 1)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    id: str
    what: str
    reason: str


def read_rows(data_dir: Path) -> tuple[list[PublishedRow], list[LeftOut]]:
    """The usable rows, each with its case (model, precision, batch per GPU, GPUs), and all others with the reason.

    Raises DataError if the table is missing or a usable row holds no number.
    """
    rows: list[PublishedRow] = []
    left_out: list[LeftOut] = []
    for entry in read_table(data_dir, "throughput.csv"):
        reason = _reason(entry)
        if reason:
            left_out.append(LeftOut(id=entry["id"], what=f"{entry['model_or_op']} {entry['precision']}", reason=reason))
            continue
        try:
            batch, value = int(entry["batch_per_gpu"]), float(entry["value"])
        except ValueError as error:
            raise DataError(f"throughput.csv row {entry['id']}: {error}; batch and value must be numbers") from error
        case = (_model(entry), PRECISIONS[entry["precision"]], batch, int(entry["gpus"]))
        rows.append(PublishedRow(id=entry["id"], case=case, samples_per_s=value))
    return rows, left_out


def _model(entry: Mapping[str, str]) -> str:
    """ "resnet50", "bert-base", "gpt-HIDDENxLAYERS" or ""."""
    name = entry["model_or_op"]
    if re.match(r"ResNet-?50 v1\.5", name):
        return "resnet50"
    if name.startswith("BERT-base"):
        return "bert-base"
    sizes = re.match(r"GPT hidden=(\d+) layers=(\d+) vocab 51200 seq 2048", name)
    return f"gpt-{sizes[1]}x{sizes[2]}" if sizes else ""


def _reason(entry: Mapping[str, str]) -> str:
    """Why the row is not a case; "" if it is one."""
    framework = re.search(r"framework ([^;]*);", entry["notes"])
    program = framework[1] if framework else "Megatron-LM" if "Megatron-LM" in entry["notes"] else ""
    if not _model(entry):
        return "another model: the zoo has none of it"
    if entry["precision"] not in PRECISIONS:
        return f"precision {entry['precision']!r} is not modelled"
    if "PyTorch" not in program and program != "Megatron-LM" and not (program == "" and "PyTorch" in entry["source"]):
        return f"another framework: {re.sub('<.*?>| *bsz=.*', '', program) or entry['notes'].split(';')[0]}"
    if "TFLOP/s" in entry["unit"]:
        return "the same measurement as another row, in TFLOP/s"
    if not entry["batch_per_gpu"]:
        return "no batch given"
    return LOADER_BOUND.get(entry["id"], "")


def medians(rows: Sequence[PublishedRow]) -> dict[tuple[str, str, int, int], float]:
    """Published samples per second by case."""
    cases = dict.fromkeys(row.case for row in rows)
    return {case: median(row.samples_per_s for row in rows if row.case == case) for case in cases}


def program_of(model: str) -> PublishedTraining:
    """The program behind a case's model. Raises DataError for a GPT whose heads are unknown."""
    if model == "resnet50":
        nhwc = FRAMEWORKS["deeplearningexamples"].convolution or PLAIN
        return PublishedTraining(spec=ModelSpec(name="resnet50"), optimizer="sgd_momentum", convolution=nhwc)
    if model == "bert-base":
        bert = (("hidden", 768), ("layers", 12), ("heads", 12), ("vocab", 30528), ("seq", 128), ("dropout", 0.1))
        spec = ModelSpec(name="tools.published.models:nvidia_bert", args=bert, input_shape=(128,))
        return PublishedTraining(spec=spec, optimizer="adamw", bucket_bytes=APEX_DDP_BYTES)
    hidden, layers = (int(size) for size in model.removeprefix("gpt-").split("x"))
    if hidden not in HEADS:
        raise DataError(f"the attention heads of {model} are unknown; known hidden sizes: {', '.join(map(str, HEADS))}")
    sizes = (("hidden", hidden), ("layers", layers), ("heads", HEADS[hidden]), ("vocab", 51200), ("seq", 2048))
    spec = ModelSpec(name="tools.published.models:megatron_gpt", args=(*sizes, ("dropout", 0.1)), input_shape=(2048,))
    return PublishedTraining(spec=spec, optimizer="adamw", recomputed=r"h\.\d+")


def problem_of(case: tuple[str, str, int, int], cluster: Cluster) -> tuple[PlanningProblem, Plan]:
    """The question a case asks of parsim, and the data-parallel plan of the program that was measured."""
    model_name, precision, batch, gpus = case
    program = program_of(model_name)
    model = run_by(load_model(program.spec), program.convolution, precision)
    numerics = Numerics(precision=precision, optimizer=program.optimizer)
    problem = PlanningProblem(model=model, cluster=cluster, global_batch=batch * gpus, numerics=numerics)
    return problem, data_parallel(model, batch, gpus, program.bucket_bytes)


def data_parallel(model: Model, batch: int, gpus: int, bucket_bytes: int) -> Plan:
    stage = Stage(components=tuple(component.name for component in model.components), ranks=tuple(range(gpus)))
    return Plan(
        strategy="single" if gpus == 1 else "dp",
        mesh=Mesh(dp=gpus),
        stages=(stage,),
        global_batch=batch * gpus,
        bucket_bytes=bucket_bytes,
    )


def recompute_s(case: tuple[str, str, int, int], problem: PlanningProblem) -> float:
    """Seconds of the second forward of the components that the program does not keep; the plan has no word for it."""
    pattern = program_of(case[0]).recomputed
    if not pattern:
        return 0.0
    costs = problem.costs(case[3])
    names = [component.name for component in problem.model.components if component.name != LOSS]
    return sum(
        costs.estimate(Compute(component=name, phase=Phase.FORWARD, samples=case[2]), 0).median_s
        for name in names
        if re.fullmatch(pattern, name)
    )


def simulated(case: tuple[str, str, int, int], profile: Profile) -> tuple[PlanningProblem, Evaluation]:
    """Plan, lower, price and simulate the case on the profile's machine."""
    problem, plan = problem_of(case, cluster_from_profile(profile, case[3]))
    return problem, evaluate(problem, plan, samples=0)


def predicted_samples_per_s(case: tuple[str, str, int, int], profile: Profile) -> float:
    """Throughput over all GPUs of the case."""
    problem, evaluation = simulated(case, profile)
    return problem.global_batch / (evaluation.result.step_s.median + recompute_s(case, problem))


def without_efficiency(profile: Profile) -> Profile:
    """The profile without what was learnt from whole models."""
    return profile.model_copy(update={"compute": profile.compute.model_copy(update={"efficiencies": []})})


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEfficiency:
    """A factor from the rows of even id, and what it does to the single-GPU rows of odd id, which it has not seen.

    Attributes: errors: per held-out row (predicted over published - 1) without the factor and with it.
    """

    efficiency: Efficiency
    errors: tuple[tuple[PublishedRow, float, float], ...]

    @property
    def helps(self) -> bool:
        """Whether the held-out rows are nearer with it, in the middle."""
        return median(abs(after) for _, _, after in self.errors) < median(abs(before) for _, before, _ in self.errors)


def fit_efficiencies(profile: Profile, rows: Sequence[PublishedRow]) -> list[FittedEfficiency]:
    """One factor per precision from the single-GPU rows of even id: the middle of published over predicted.

    The median of the logarithms; `spread` is their robust standard deviation (1.4826 times the median absolute deviation).
    Raises DataError where a precision has no row of even or none of odd id.
    """
    operators_only = without_efficiency(profile)
    (device_type,) = profile.device_types
    single = [row for row in rows if row.case[3] == 1]
    predicted = {case: predicted_samples_per_s(case, operators_only) for case in dict.fromkeys(row.case for row in single)}
    found = []
    for precision in sorted({row.case[1] for row in single}):
        even, odd = ([row for row in single if row.case[1] == precision and row.number % 2 == parity] for parity in (0, 1))
        if not even or not odd:
            raise DataError(f"{len(even)} rows of even and {len(odd)} of odd id in {precision}; a fit and its check need both")
        logs = np.log([row.samples_per_s / predicted[row.case] for row in even])
        middle = float(np.median(logs))
        factor = rounded(float(np.exp(middle)))
        ratios = [(row, predicted[row.case] / row.samples_per_s) for row in odd]
        efficiency = Efficiency(
            precision=precision,
            device_type=device_type,
            factor=factor,
            spread=rounded(1.4826 * float(np.median(np.abs(logs - middle)))),
            points=len(even),
            source=EFFICIENCY,
        )
        errors = tuple((row, ratio - 1, factor * ratio - 1) for row, ratio in ratios)
        found.append(FittedEfficiency(efficiency=efficiency, errors=errors))
    return found


def with_efficiencies(profile: Profile, data_dir: Path) -> Profile:
    """The profile with the factors that help this machine's held-out rows of whole models, and their source."""
    rows, _ = read_rows(data_dir)
    used = [entry.efficiency for entry in fit_efficiencies(profile, rows) if entry.helps]
    precisions = {entry.precision for entry in used}
    even = sorted(row.id for row in rows if row.case[1] in precisions and row.case[3] == 1 and row.number % 2 == 0)
    text = (
        "published over predicted throughput of one V100 (ResNet-50 and BERT-base under PyTorch), median over rows "
        f"{', '.join(even)}; those of odd id are held out, and only a factor that brings them nearer is kept. "
        "Sources: github NVIDIA/DeepLearningExamples @729963dd47e7, Oneflow-Inc/DLPerf @c89430bac64f"
    )
    sources = {**profile.sources, EFFICIENCY: SourceEntry(kind="derived", text=text)} if used else profile.sources
    compute = profile.compute.model_copy(update={"efficiencies": used})
    return profile.model_copy(update={"sources": sources, "compute": compute})
