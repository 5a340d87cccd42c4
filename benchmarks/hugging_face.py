"""Parameters, components, trace times and flop of Hugging Face models, as the table in docs/models.md.

python benchmarks/hugging_face.py [--write]

Times are CPU seconds of this process, the median of three traces at granularity sublayer: building the module without memory
for its weights, and tracing it. Imports are not counted, and no kept Model is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- hugging face: begin -->", "<!-- hugging face: end -->"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
ROUNDS = 3


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with so many layers."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(config["model_type"]).to_dict()
    names = [name for name in LAYERS if name in config or (name in known and name != "num_layers")]
    short = {**config, **dict.fromkeys(names or ["num_hidden_layers"], layers)}
    if "vision_config" in known:
        short |= {"vision_config": {"num_hidden_layers": layers}, "text_config": {"num_hidden_layers": layers}}
    return short


def traced(config: dict[str, Any], folder: Path) -> tuple[Any, float]:
    """The Model, and the median of its trace times."""
    from parsim.model.interface import interface_of
    from parsim.model.load import trace_spec
    from parsim.model.spec import ModelSpec

    path = folder / f"{abs(hash(json.dumps(config)))}.json"
    path.write_text(json.dumps(config))
    spec = ModelSpec(name=str(path))
    interface_of(spec)
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        model = trace_spec(spec, "sublayer")
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


def row(name: str, config: dict[str, Any], folder: Path) -> str:
    """One line of the table."""
    model, full = traced(config, folder)
    _, two = traced(shortened(config, 2), folder)
    cells = (name, config["architectures"][0], f"{model.parameter_count:,}", len(model.components), f"{two:.1f}", f"{full:.1f}")
    return f"| {' | '.join(map(str, cells))} | {products(model) / 1e9:,.0f} |"


def main() -> int:
    """Print the table, or write it into docs/models.md."""
    sys.path.insert(0, str(ROOT))
    from tests.hugging_face_configs import FULL

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, config, Path(folder)) for name, (config, _) in FULL.items()]
    head = (
        "| model | architecture | parameters | components | 2 layers, s | all layers, s | forward, Gflop per sample |\n"
        "|---|---|---|---|---|---|---|"
    )
    text = "\n".join([head, *rows])
    if not options.write:
        print(text)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
