"""How close are the predictions on the machine at hand, and how often do the intervals hold?

    python -m experiments.this_machine.run [--quick] [--out DIR] [--records N] [--rounds N] [--seed N] [--json]
        [--keep FILE.tar.xz]

1. Calibrates the machine on half of the models: with a rank per core and with twice as many. Where root can make them, also
   with two ranks in network namespaces of their own, joined by a link of 1 Gbit/s.
2. Predicts every case (six models, plans on one to four processes) and writes the predictions down.
3. Measures all cases in interleaved rounds, N records one after the other, each with launches of its own. For 20 seconds before
   each launch `parsim calibrate --refresh` looks how fast the cores are, and every case is said again with that. A probe before
   and after each round of each case tells how fast the cores were, and every case is said once more at that pace.
4. Judges: errors beside the A/A floor, coverage of the intervals, order of the plans, what the predicted choice costs, and
   what every correction is worth.

A step that is done (its file lies in DIR) is not done again. So a record that was stopped goes on, and more records can be
added to predictions that stay as they were. A DIR of other models, launches or seed is refused. `--keep` packs DIR into one
file; unpacked, it is a DIR that judges again without measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.rounds.calibrate import Launcher, calibrate
from calibration.rounds.refresh import refresh
from calibration.rounds.request import CalibrationRequest, raw_path
from experiments.common.running import part_parser
from experiments.this_machine.ablation import WITHOUT
from experiments.this_machine.cases import CALIBRATED_BATCHES, GRANULARITY, SMALL, SUBJECTS, Case, Subject, cases_of, problem_of
from experiments.this_machine.judge import tables
from experiments.this_machine.judging import CaseRow, judged
from experiments.this_machine.namespaces import possible, shaped_pair
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import Measurement, load_measurement
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.execute.processes.output import relayed
from parsim.files import write_text_atomically
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import PaceToday, Profile, save_profile
from parsim.hardware.speed_factor import SpeedFactor, probe_seconds, speed_beside
from parsim.model.load import load_model
from parsim.plans.plan import Plan
from parsim.predict.compare import aa_floor
from parsim.predict.evaluate import evaluate, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower

BUDGETS = ("compute", "shard", "operator", "collective", "overlap")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A launch of a record: how many ranks, over which link (None: the loopback interface), which plans (none named: all), and
    the share of the usual time that its calibration takes."""

    ranks: int
    link_bytes_per_s: float | None = None
    labels: tuple[str, ...] = ()
    calibration_share: float = 1.0

    @contextlib.contextmanager
    def launcher(self) -> Iterator[Launcher]:
        if self.link_bytes_per_s is None:
            yield launch
            return
        with shaped_pair(self.link_bytes_per_s) as shaped:
            yield shaped


PIPELINE = "pp 2, 1f1b, 4 microbatches"
SETTINGS = {
    "two": Setting(ranks=SMALL),
    "four": Setting(ranks=2 * SMALL, labels=("dp 4", "dp 2 pp 2, 1f1b, 2 microbatches"), calibration_share=0.6),
    "shaped": Setting(ranks=SMALL, link_bytes_per_s=125e6, labels=("dp 2", PIPELINE), calibration_share=0.6),
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A case of a launch with what the profile said of it: median, p05 and p95 of the mean step, at a pace of the probe with a
    rank on every core."""

    launch: str
    case: Case
    step_s: tuple[float, float, float]
    pace_s: float

    def to_dict(self) -> dict[str, Any]:
        case = {"model": self.case.subject.name, "label": self.case.label, "plan": self.case.plan.to_json()}
        return {**case, "launch": self.launch, "step_s": self.step_s, "pace_s": self.pace_s}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Prediction:
        (subject,) = (subject for subject in SUBJECTS if subject.name == entry["model"])
        return cls(
            launch=entry["launch"],
            case=Case(subject=subject, label=entry["label"], plan=Plan.from_json(entry["plan"])),
            step_s=tuple(entry["step_s"]),
            pace_s=entry["pace_s"],
        )


def main() -> None:
    parser = part_parser(__doc__, "one model, two rounds, one record", out="runs/this_machine")
    parser.add_argument("--models", help="some of them, by name")
    parser.add_argument("--launches", help="some of them: two, four, shaped")
    parser.add_argument("--records", type=int, default=5, help="0: calibrate and predict alone")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FILE.tar.xz", help="pack profiles, predictions and records into it")
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else ["mlp"] if asked.quick else [subject.name for subject in SUBJECTS]
    subjects = [subject for subject in SUBJECTS if subject.name in names]
    wanted = asked.launches.split(",") if asked.launches else ["two", "four"] if asked.quick else list(SETTINGS)
    for option, given, known in (("models", names, [each.name for each in SUBJECTS]), ("launches", wanted, list(SETTINGS))):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{option}: no {', '.join(unknown)}; there are {', '.join(known)}")
    if "shaped" in wanted and (why := possible()):
        progress(f"no record over a shaped link: {why}")
        wanted.remove("shaped")
    if all(SETTINGS[name].link_bytes_per_s is not None for name in wanted):
        parser.error("--launches: give two or four; the pace of the cores is looked up without a shaped link")
    records, rounds = (1, 4) if asked.quick else (asked.records, asked.rounds)
    if asked.keep is not None and not asked.keep.absolute().parent.is_dir():
        parser.error(f"--keep {asked.keep}: there is no folder {asked.keep.parent}")
    about = {"models": names, "launches": wanted, "rounds": rounds, "seed": asked.seed, "quick": asked.quick}
    if other := other_record(asked.out, about):
        parser.error(f"{asked.out} holds a record of {other}; give another --out, or remove it")
    profiles = {name: calibrated(asked.out / f"{name}.json", SETTINGS[name], subjects, asked) for name in wanted}
    said = predictions(asked.out / "predictions.json", profiles, subjects)
    if records == 0:
        progress(f"calibrated, and predicted {len(said)} cases: {asked.out / 'predictions.json'}")
        return
    rows: list[CaseRow] = []
    for number in range(1, records + 1):
        rows += record(asked.out / f"record-{number}", said, profiles, rounds, asked.seed + number)
    verdict = judged(rows)
    document = {"machine": machine_line(describe_environment()), "date": time.strftime("%Y-%m-%d"), **verdict}
    write_text_atomically(asked.out / "verdict.json", json.dumps(document, indent=1))
    if asked.keep is not None:
        pack(asked.out, asked.keep)
    print(json.dumps(document) if asked.json else tables(document)["this_machine"])


def other_record(folder: Path, about: Mapping[str, Any]) -> str:
    """What a folder holds if that is not this record; "" where it does or is new. A new one is marked as this record.

    about: the arguments that rows of one record share.
    """
    path = folder / "record.json"
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))
        return "" if there == about else f"other arguments ({json.dumps(there)})"
    if (folder / "predictions.json").is_file():
        return "unknown arguments"
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(about))
    return ""


def pack(folder: Path, file: Path) -> None:
    """Write profiles, their raw points, predictions and every row of every record into one compressed file."""
    made = file.with_name(f".{file.name}")
    with tarfile.open(made, "w:xz") as packed:
        for path in sorted(folder.rglob("*")):
            if path.name.endswith((".json", ".json.gz")):
                packed.add(path, arcname=str(path.relative_to(folder)))
    made.replace(file)


def calibrated(path: Path, setting: Setting, subjects: Sequence[Subject], asked: argparse.Namespace) -> Profile:
    """The profile of this machine in this setting, measured on the calibrated models alone."""
    if not path.is_file():
        models = [subject for subject in subjects if subject.calibrated]
        request = CalibrationRequest(
            models=tuple((subject.spec, CALIBRATED_BATCHES) for subject in models),
            nproc=setting.ranks,
            optimizers=tuple(dict.fromkeys(subject.optimizer for subject in subjects)),
            granularities=(GRANULARITY,),
            quick=asked.quick,
            seed=asked.seed,
        )
        budgets = {f"{name}_budget_s": getattr(request, f"{name}_budget_s") for name in BUDGETS}
        request = replace(request, **{name: setting.calibration_share * seconds for name, seconds in budgets.items()})
        with setting.launcher() as launcher:
            calibrate(request, path, on_line=progress, launcher=launcher)
    return load_profile(str(path))


def predictions(path: Path, profiles: Mapping[str, Profile], subjects: Sequence[Subject]) -> list[Prediction]:
    """Every case with what is said of it before anything is measured; as it was first said, if `path` is there.

    All at one pace, the mean of what the calibrations saw: one that fell into a fast spell says nothing of the settings.
    """
    if not path.is_file():
        usual_s = statistics.mean(pace_of(profile) for profile in profiles.values())
        said = [
            predicted(name, case, profile, usual_s / pace_of(profile))
            for name, profile in profiles.items()
            for subject in subjects
            for case in cases_of(subject, problem_of(subject, cluster_from_profile(profile, SETTINGS[name].ranks)))
            if case.label in (SETTINGS[name].labels or (case.label,))
        ]
        write_text_atomically(path, json.dumps([entry.to_dict() for entry in said], indent=1))
    return [Prediction.from_dict(entry) for entry in json.loads(path.read_text())]


def pace_of(profile: Profile) -> float:
    found_s = probe_seconds(profile)
    assert found_s is not None, "a calibration has a probe"
    return found_s


def predicted(launch_name: str, case: Case, profile: Profile, slow: float) -> Prediction:
    """Args: slow: how many times as long all is said to take as in the profile."""
    interval = evaluate(question(launch_name, case, profile), case.plan, fold=False).result.step_s
    return Prediction(
        launch=launch_name,
        case=case,
        step_s=(slow * interval.median, slow * interval.p05, slow * interval.p95),
        pace_s=slow * pace_of(profile),
    )


def question(launch_name: str, case: Case, profile: Profile) -> PlanningProblem:
    return problem_of(case.subject, cluster_from_profile(profile, SETTINGS[launch_name].ranks))


def record(
    folder: Path, cases: Sequence[Prediction], profiles: Mapping[str, Profile], rounds: int, number: int
) -> list[CaseRow]:
    """All cases measured once more, one launch per number of ranks; a launch whose rows lie there is not repeated."""
    rows: list[CaseRow] = []
    for name, setting in SETTINGS.items():
        path = folder / f"{name}.json"
        chosen = [case for case in cases if case.launch == name]
        if chosen and not path.is_file():
            today = pace_today(folder / f"{name}.pace.json", profiles, folder.parent)
            with setting.launcher() as launcher:
                seen = measure(folder / name, [entry.case for entry in chosen], setting.ranks, rounds, launcher, seed=number)
            said = {entry.case.name: entry for entry in chosen}
            measured = [row_of(folder.name, said[case.name], found, profiles[name], today) for case, found in seen]
            write_text_atomically(path, json.dumps([asdict(row) for row in measured]))
            shutil.rmtree(folder / name)
        if path.is_file():
            rows += [CaseRow.from_dict(row) for row in json.loads(path.read_text())]
    return rows


def pace_today(path: Path, profiles: Mapping[str, Profile], calibrations: Path) -> PaceToday:
    """The pace of the cores right now: a copy of a profile, with ranks on the loopback interface, refreshed at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name, usual = next(entry for entry in profiles.items() if SETTINGS[entry[0]].link_bytes_per_s is None)
    save_profile(usual, path)
    shutil.copyfile(raw_path(calibrations / f"{name}.json"), raw_path(path))
    today = refresh(path).today
    assert today is not None, "it was refreshed"
    return today


def row_of(record_name: str, said: Prediction, measurement: Measurement, profile: Profile, today: PaceToday) -> CaseRow:
    """What one case took, beside what was said of it at first, with the pace right before, and at the pace beside it."""
    case = said.case
    speed = speed_beside(profile, measurement.pace_s, case.plan.world_size)
    assert speed is not None, "the calibration and the record have a probe"
    floor = aa_floor([[float(value)] for value in measurement.step_s])
    floor_at_speed = aa_floor([[float(value)] for value in measurement.step_s / speed.by_rank.mean(axis=0)])
    return CaseRow(
        record=record_name,
        launch=said.launch,
        model=case.subject.name,
        label=case.label,
        ranks=case.plan.world_size,
        calibrated=case.subject.calibrated,
        predicted_s=said.step_s[0],
        low_s=said.step_s[1],
        high_s=said.step_s[2],
        refreshed_s=evaluate(
            question(said.launch, case, profile.model_copy(update={"today": today})), case.plan, samples=0, fold=False
        ).result.step_s.median,
        at_speed_s=at_speed_s(said.launch, case, profile, speed),
        slowness=speed.mean,
        measured_s=measurement.mean_step_s,
        aa_median=floor.median,
        aa_p95=floor.p95,
        aa_at_speed=(floor_at_speed.median, floor_at_speed.p95),
        without={name: at_speed_s(said.launch, case, less(profile), speed) for name, less in WITHOUT.items()},
        rounds_s=[float(value) for value in measurement.step_s],
        probes_s=np.asarray(measurement.pace_s).tolist(),
    )


def at_speed_s(launch_name: str, case: Case, profile: Profile, speed: SpeedFactor) -> float:
    """The step at the speed of the cores beside its rounds. Args: speed: by the profile with all corrections."""
    asked = question(launch_name, case, profile)
    return step_at_speed(asked, evaluate(asked, case.plan, samples=0, fold=False), speed)


TIMEOUT_S = 3600.0
STEPS, SETTLE_STEPS = 2, 1
"""Of every case in every round: two steps that count, after one in which the caches settle."""


def measure(
    folder: Path, cases: Sequence[Case], ranks: int, rounds: int, launcher: Launcher, *, seed: int
) -> list[tuple[Case, Measurement]]:
    """Every case in turn, round after round. The order of the cases is drawn anew for every seed."""
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(cases, key=lambda case: case.name)
    random.Random(seed).shuffle(order)
    models = {case.subject.name: load_model(case.subject.spec, granularity=GRANULARITY) for case in order}
    for name, model in models.items():
        model.save(folder / f"{name}.json")
    runs = tuple(run_of(case, folder) for case in order)
    job = Job(output=str(folder.resolve()), mode="measure", runs=runs, steps=STEPS, rounds=rounds, settle_steps=SETTLE_STEPS)
    job.save(folder / "job.json")
    launcher(folder / "job.json", ranks, timeout_s=TIMEOUT_S, on_line=relayed(progress))
    return [(case, load_measurement(folder / case.name, lower(case.plan, models[case.subject.name]))) for case in order]


def run_of(case: Case, folder: Path) -> RunSpec:
    return RunSpec(
        name=case.name,
        model=case.subject.spec,
        model_path=str(folder / f"{case.subject.name}.json"),
        plan=case.plan,
        optimizer=case.subject.optimizer,
        learning_rate=1e-4,
        dataset=case.subject.dataset,
    )


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
