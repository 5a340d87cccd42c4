"""Parameters, components, trace times and flop of Hugging Face models, as the table in docs/models.md.

python benchmarks/hugging_face.py [--write] [--jobs N] [--only NAME] [--from NAME]

Times are CPU seconds of one process for one load (the median of ROUNDS): reading the config, building the module without memory
for its weights, and tracing it. Imports are not counted, and no kept Model is read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common.markdown import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- hugging face: begin -->", "<!-- hugging face: end -->"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
ROUNDS = 1
GRANULARITIES = ("block", "sublayer", "layer")


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with so many layers."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(config["model_type"]).to_dict()
    names = [name for name in LAYERS if name in config or (name in known and name != "num_layers")]
    short = {**config, **dict.fromkeys(names or ["num_hidden_layers"], layers)}
    if "vision_config" in known:
        short |= {"vision_config": {"num_hidden_layers": layers}, "text_config": {"num_hidden_layers": layers}}
    return short


def loaded(config: dict[str, Any], folder: Path, granularity: str) -> tuple[Any, float]:
    """The Model, and the median of its load times. Every round has a config of its own name, so that nothing is known of it."""
    from parsim.model.load import load_model
    from parsim.model.spec import ModelSpec

    times = []
    for number in range(ROUNDS):
        path = folder / f"{number}-{abs(hash(json.dumps(config)))}-{granularity}.json"
        path.write_text(json.dumps(config))
        start = time.process_time()
        model = load_model(ModelSpec(name=str(path)), granularity=granularity)
        times.append(time.process_time() - start)
    return model, statistics.median(times)


def products(model: Any) -> float:
    """Flop of a forward in matrix products, convolutions and attention."""
    kinds = ("matmul", "convolution", "attention")
    return sum(
        float(operator.forward_flop * operator.count)
        for component in model.components
        for operator in component.operators
        if operator.kind in kinds and operator.batch != "none"
    )


def row(name: str) -> str:
    """One line of the table."""
    from tests.hugging_face_configs import FULL, SMALL

    os.environ["PARSIM_MODEL_CACHE"] = "off"
    config, _ = FULL[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for granularity in GRANULARITIES:  # what torch prepares at its first call
            loaded(shortened(SMALL["gpt2"], 1), folder, granularity)
        loaded(shortened(config, 1), folder, "sublayer")  # imports of the architecture
        models, times = zip(*(loaded(config, folder, granularity) for granularity in GRANULARITIES), strict=True)
    model = models[GRANULARITIES.index("sublayer")]
    cells = (name, config["architectures"][0], f"{model.parameter_count:,}", len(model.components))
    seconds = " | ".join(f"{entry:.1f}" for entry in times)
    return f"| {' | '.join(map(str, cells))} | {seconds} | {products(model) / 1e9:,.0f} |"


HEAD = (
    "| model | architecture | parameters | components | block, s | sublayer, s | layer, s | forward, Gflop per sample |\n"
    "|---|---|---|---|---|---|---|---|"
)


def table_with(made: dict[str, str], order: list[str]) -> str:
    """The table of the page with some rows made anew."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    known = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    rows = [made.get(name) or known[name] for name in order if name in made or name in known]
    return "\n".join([HEAD, *rows])


def write(table: str) -> None:
    """Put the table in its place on the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replaced(page, BEGIN, END, table), encoding="utf-8")


def main() -> int:
    """Print the table, or write every row into docs/models.md as soon as it is made."""
    from tests.hugging_face_configs import FULL

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="a run that was stopped keeps its rows")
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, each in a process of its own")
    parser.add_argument("--only", help="rows whose name contains this; the others stay as they are")
    parser.add_argument("--from", dest="first", choices=FULL, help="rows from this one on, after a run that was stopped")
    options = parser.parse_args()
    order = list(FULL)
    names = [name for name in order[order.index(options.first or order[0]) :] if not options.only or options.only in name]
    made: dict[str, str] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, line in zip(names, pool.map(row, names), strict=True):
            made[name] = line
            print(line, flush=True)
            if options.write:
                write(table_with(made, order))
    if not options.write:
        print(table_with(made, order))
    return 0


if __name__ == "__main__":
    sys.exit(main())
