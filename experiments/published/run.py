"""How far are predictions of published training runs from what was measured, judged on sources that nothing was fitted on?

    python -m experiments.published.run --rows TRAINING.csv MORE.csv [--quick] [--json] [--only REGEX] [--keep FILE]

Predicts every row twice (`predict.py`): with its framework, and as if nothing said which it is. Each source is judged by
effects that were fitted on the rows of all other sources. Writes results.json beside this file, and the effects of all rows to
parsim/costs/published.json, by which answers are corrected. The rows themselves are not part of the repository.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.stats import rankdata

from experiments.common.catalogue import record
from experiments.published.fitting import Judged, covered, fitted, held_out, relative
from experiments.published.judge import tables
from experiments.published.predict import Predicted, predict_all
from experiments.published.quoted import BEYOND_PEAK
from experiments.published.rows import Row, read_rows
from experiments.published.rules import WITHOUT
from parsim.costs import published
from parsim.files import write_atomically

HERE = Path(__file__).parent
KEPT_AT_ONCE = 40
"""Rows between two writes of `--keep`."""
NOT_JUDGED = {"CHECK"}
"""Rows whose notes hold such a word are left out: their source is in doubt. So are values that no GPU reaches."""

GROUPS: dict[str, str] = {
    "Megatron, Selene": r"^(korthikanti|megatron-sc21|megatron-readme175b|mtnlg|megatron-mfu2022)",
    "Megatron, 2020 and January 2021": r"^megatron-(jan2021|sep2020)",
    "multi-node A100 (vTrain)": r"^vtrain-multi",
    "BLOOM tuning, A100": r"^bloom",
    "FSDP, A100 (mosaic)": r"^mosaic.*@A100",
    "FSDP, H100 (mosaic)": r"^mosaic.*@H100",
    "FSDP2 (torchtitan)": r"^titan",
    "InternEvo, A100": r"^internevo",
    "SimuMax, B200": r"^simumax",
    "Megatron-Core and NeMo, H100": r"^(megatron-h100|nemo|llama3).*@H100",
    "NeMo, Blackwell": r"^nemo.*@G?B\d",
    "Sailor": r"^sailor",
    "others": r".",
}
"""First match wins, on `id@GPU`."""


def judged(predictions: Sequence[Predicted]) -> list[Judged]:
    """Those that have a prediction and a value."""
    found = []
    for entry in predictions:
        row = entry.row
        doubted = BEYOND_PEAK in entry.why or any(word in row.notes for word in NOT_JUDGED)
        if entry.value is None or row.value is None or entry.facts is None or doubted:
            continue
        ratio = row.value / entry.value if entry.facts.rate else entry.value / row.value
        place = f"{row.id}@{entry.facts.run.gpu.split('-')[0].upper()}"
        group = next(name for name, pattern in GROUPS.items() if re.search(pattern, place))
        source = row.source_key or row.source.split(":")[0].split("@")[0].strip() or row.prefix  # one repository or paper
        found.append(Judged(predicted=entry, log_error=math.log(ratio), group=group, source=source))
    return found


def summary(
    rows: Sequence[Judged], medians: Mapping[str, tuple[float, float]], intervals: Mapping[str, tuple[bool, float]]
) -> dict[str, Any]:
    """The numbers of a group of rows, in per cent: without effects, and with those of other sources."""
    if not rows:
        return {}
    raw = [row.log_error for row in rows]
    held = [row.log_error + medians[row.predicted.row.id][0] for row in rows]
    inside = [intervals[row.predicted.row.id] for row in rows]
    return {
        "rows": len(rows),
        "sources": len({row.source for row in rows}),
        "mean_error": _mean_error(raw),
        "bias": 100 * mean(relative(value) for value in raw),
        "one_factor": _mean_error([value - median(raw) for value in raw]),
        "held_out": _mean_error(held),
        "held_out_median": 100 * median(abs(relative(value)) for value in held),
        "held_out_bias": 100 * mean(relative(value) for value in held),
        "coverage": 100 * mean(holds for holds, _ in inside),
        "width": 100 * median(width for _, width in inside),
        "does_not_fit": sum(1 for row in rows if (row.predicted.fit_probability or 0.0) < 0.5),
        "spearman": spearman(rows),
    }


def _mean_error(logs: Sequence[float]) -> float:
    return 100 * mean(abs(relative(value)) for value in logs)


def spearman(rows: Sequence[Judged]) -> float | None:
    """Mean over models with at least four rows of one source, of the rank correlation of step seconds per token."""
    models: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        facts = row.predicted.facts
        assert facts is not None
        models[f"{row.source} {facts.model} {facts.gpus}"].append(row)
    found = []
    for group in models.values():
        if len(group) < 4:
            continue
        predicted, measured = [], []
        for row in group:
            facts = row.predicted.facts
            assert facts is not None
            own = math.log((row.predicted.step_s or 1.0) / facts.tokens)
            predicted.append(own)
            measured.append(own - row.log_error)
        ranks = [rankdata(values, "ordinal") for values in (predicted, measured)]
        found.append(float(np.corrcoef(*ranks)[0, 1]))
    return mean(found) if found else None


def tables_of(rows: Sequence[Judged], guessed: Sequence[Judged] = ()) -> dict[str, Any]:
    """Figures of all rows, of complete ones, and by group, source and framework; or of guessed ones, by effects of the rows."""
    medians = held_out(rows, guessed)
    rows = guessed or rows
    intervals = covered(rows, medians)

    def by(key: Callable[[Judged], str]) -> dict[str, Any]:
        groups: dict[str, list[Judged]] = defaultdict(list)
        for row in rows:
            groups[key(row)].append(row)
        return {name: summary(groups[name], medians, intervals) for name in sorted(groups)}

    return {
        "all": summary(rows, medians, intervals),
        "complete": summary([row for row in rows if not row.predicted.row.assumed], medians, intervals),
        "groups": by(lambda row: row.group),
        "by_source": by(lambda row: row.source),
        "by_framework": by(lambda row: row.predicted.why.split(":")[0]),
        "by_chip": by(lambda row: row.facts.run.chip),
        "held_out": {row.predicted.row.id: _held_out_error(row, medians) for row in rows},
    }


def _held_out_error(row: Judged, medians: Mapping[str, tuple[float, float]]) -> float:
    return round(100 * relative(row.log_error + medians[row.predicted.row.id][0]), 2)


def without_framework(predictions: Sequence[Predicted]) -> list[Judged]:
    """Those that were predicted as if nothing said which framework ran; rows of images always have theirs."""
    return [row for row in judged(predictions) if row.facts.run.framework == published.UNKNOWN]


def results(predictions: Sequence[Predicted], unknown: Sequence[Predicted]) -> dict[str, Any]:
    """The whole document, from predictions of all rows without effects: with their frameworks, and without any."""
    rows = judged(predictions)
    found = tables_of(rows)
    worst = sorted(rows, key=lambda row: -abs(found["held_out"][row.predicted.row.id]))[:25]
    return {
        "rows": len(predictions),
        "judged": len(rows),
        **found,
        "unknown": tables_of(rows, without_framework(unknown)),
        "effects": {name: list(entry) for name, entry in _shown_effects(rows, without_framework(unknown)).items()},
        "worst": [
            {
                "id": row.predicted.row.id,
                "error": 100 * relative(row.log_error),
                "held_out": found["held_out"][row.predicted.row.id],
                "why": row.predicted.why,
            }
            for row in worst
        ],
        "not_expressed": {entry.row.id: entry.why for entry in predictions if entry.value is None},
        "does_not_fit": [row.predicted.row.id for row in rows if (row.predicted.fit_probability or 0.0) < 0.5],
        "errors": {row.predicted.row.id: round(100 * relative(row.log_error), 2) for row in rows},
    }


def _shown_effects(rows: Sequence[Judged], guessed: Sequence[Judged]) -> dict[str, tuple[float, int]]:
    """By name the factor on seconds and the number of sources."""
    effects = fitted(rows, guessed)
    return {name: (math.exp(effects.mean[name]), effects.sources[name]) for name in effects.names}


def write(predictions: Sequence[Predicted], unknown: Sequence[Predicted], document: Mapping[str, Any]) -> None:
    """published.json of the package and results.json beside this file."""
    rows = judged(predictions)
    sources = sorted({row.source for row in rows})
    command = "python -m experiments.published.run --rows FILES"
    fit = fitted(rows, without_framework(unknown)).to_dict()
    text = json.dumps({"command": command, "sources": sources, "fit": fit}, separators=(",", ":"))
    Path(published.__file__).with_name("published.json").write_text(text.replace('],"', '],\n"') + "\n")
    record("published", document)


WORTH: dict[str, str] = {
    "repeated sums": r"^(korthikanti|megatron-sc21-000[1-9]|megatron-readme|vtrain-multi-00[0-3])",
    "scatter-gather": r"^(megatron-readme|vtrain-multi-00[3-9])",
    "blocking transfers": r"^(megatron-readme|vtrain-multi-00[3-9])",
    "fused Adam": r"^(korthikanti|internevo-00[0-2])",
    "sequence parallelism": r"^(nemo2407|megatron-h100)",
    "gathering ahead": r"^(nemo2407|megatron-h100)",
    "fused attention": r"^(mosaic-00[2-6]|internevo-00[0-2])",
    "age of the attention kernel": r"^(mosaic-00[2-6]|internevo-00[0-2])",
    "late gathering": r"^mosaic-00[2-6]",
    "sums of gradients": r"^(korthikanti|megatron-(sc21|readme)|bloom-tune-00[3-8])",
    "unaligned heads": r"^bloom-tune-(00[0-2]|0073|010[479])",
    "casts in the kernels before": r"^mlperf-bert",
    "biases of experts": r"^nemo-bridge-0(005|045|046|096|138|253)",
    "experts before fused products": r"^nemo-bridge-(0(096|099)|01(0[0456]|36|4[478]|50|80|9[034])|02(2[456]|31|5[345]|61|78))",
    "metrics of Composer": r"^mosaic-0(0[4-6]|1[12389])",
    "unfused AdamW of Composer": r"^mosaic-003",
    "early stop, A100": r"^mosaic-0(08[3-9]|09|1[0-3])",
    "early stop, H100": r"^mosaic-00([0-6]|7[01])",
    "host launch rate": r"^sailor-clariden",
    "fp32 of Sailor": r"^sailor-clariden",
    "kernels of biases": r"^(korthikanti|megatron-(sc21-000[12]|sep2020)|vtrain-multi-00[0-2])",
    "passes of the loss": r"^(korthikanti|megatron-(sc21-000[12]|sep2020)|vtrain-multi-00[0-2])",
    "clipping": r"^(korthikanti|megatron-(sc21|sep2020))",
    "loss scaling": r"^(korthikanti|megatron-(sc21|sep2020))",
    "limits of the fused softmax": r"^vtrain-multi-0040",
    "gradients of bf16 in fp32": r"^(mtnlg|bloom-tune-(000[56]|013[0479]|0142))",
    "sums beside weight gradients": r"^(korthikanti|megatron-(mfu2022|sc21|readme))",
    "layers spared by recipes": r"^nemo-bridge-(0(024|042|048|089|099|1(00|06|25|26|44|79|88|90))|"
    r"02(05|16|2[456]|4[35]|5[35]|6[135]|78))",
    "tensor parallelism of NeMo 2023 alone": r"^nemo-launcher-00(0[789]|1[01]|34)",
    "overlap of tensor parallelism": r"^(megatron-h100|nemo2407-00(02|04|07|10))",
}
"""By piece the rows on which its worth is measured."""


def worth(rows: Sequence[Row], piece: str, options: argparse.Namespace) -> dict[str, Any]:
    """Without a piece and with it: mean error and bias without a factor, and mean error after a factor of the rows' own.

    The last is what a piece is judged by where all rows of a GPU are too fast: any piece that shortens a step would look bad.
    Processes are not started, which would take longer.
    """
    chosen = [row for row in rows if re.search(WORTH[piece], row.id)]
    numbers: dict[str, Any] = {}
    for name, predictions in (
        ("before", predict_all(chosen, 1, piece, raw=True)),
        ("after", predictions_of(chosen, options, known=True)),
    ):
        errors = [relative(row.log_error) for row in judged(predictions)]
        shift = median(math.log1p(error) for error in errors)
        numbers["rows"] = len(errors)
        numbers[name] = {
            "mean_error": 100 * mean(abs(error) for error in errors),
            "bias": 100 * mean(errors),
            "one_factor": 100 * mean(abs(relative(math.log1p(error) - shift)) for error in errors),
        }
    return numbers


def predictions_of(rows: Sequence[Row], options: argparse.Namespace, *, known: bool) -> list[Predicted]:
    """Of all rows without effects; with `--keep` they are kept as they come, and a run that was stopped goes on."""
    predict = partial(predict_all, jobs=options.jobs, without=options.without, raw=True, known=known)
    if options.keep is None:
        return predict(rows)
    path = options.keep.with_suffix(".known" if known else ".unknown")
    kept: dict[str, Predicted] = pickle.loads(path.read_bytes()) if path.is_file() else {}
    missing = [row for row in rows if row.id not in kept]
    for begin in range(0, len(missing), KEPT_AT_ONCE):
        kept |= {entry.row.id: entry for entry in predict(missing[begin : begin + KEPT_AT_ONCE])}
        content = pickle.dumps(kept)
        write_atomically(path, lambda file, content=content: file.write(content))
    return [kept[row.id] for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="csv files of published runs")
    parser.add_argument("--only", default=".", help="ids to predict, a regular expression; then nothing is written")
    parser.add_argument("--quick", action="store_true", help="every tenth row; nothing is written")
    parser.add_argument("--without", default="", choices=("", *WITHOUT), help="a piece to leave out; no results are written")
    parser.add_argument(
        "--worth", action="store_true", help="what each piece is worth, or that of --without; writes worth.json"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, help="keep predictions here (pickled), and go on from it; of this source alone")
    parser.add_argument("--json", action="store_true", help="print results.json")
    options = parser.parse_args(arguments)
    if absent := [path for path in options.rows if not path.is_file()]:
        print(f"no file {absent[0]}; give csv files of published runs with --rows", file=sys.stderr)
        return 1
    rows = [row for path in options.rows for row in read_rows(path) if re.search(options.only, row.id)]
    if options.worth:
        path = HERE / "worth.json"
        pieces, options.without = [options.without] if options.without else list(WORTH), ""
        for piece in pieces:
            known = json.loads(path.read_text()) if path.is_file() else {}
            found = {name: entry for name, entry in known.items() if name in WORTH} | {piece: worth(rows, piece, options)}
            path.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    if options.quick:
        rows = rows[::10]
    predictions, unknown = (predictions_of(rows, options, known=known) for known in (True, False))
    document = results(predictions, unknown)
    if not options.quick and options.only == "." and not options.without:
        write(predictions, unknown, document)
    print(json.dumps(document, indent=1) if options.json else tables(document)["groups of rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
