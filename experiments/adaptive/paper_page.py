"""docs/paper.md: Table I and Figures 1 to 6 of the adaptive scheduling paper: printed, on honest V100s, fitted, trained here.

    python -m experiments.adaptive.paper_page            the page and its pictures, from results.json
    python -m experiments.adaptive.paper_page --again    compute Table I, Figures 2 and 6 and the fit first (3 CPU minutes)

`python experiments/results.py --only adaptive_parallelism` computes everything else too, and keeps it in results.json.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.adaptive.judge_parallelism import MODELS, STRATEGIES, kind_of, verdict_of
from experiments.common.catalogue import ROOT, recorded
from experiments.common.markdown import replaced, row_table
from parsim.files import write_text_atomically
from parsim.report.legend import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION
from parsim.report.picture import LOOK

PAGE, PICTURES = ROOT / "docs" / "paper.md", ROOT / "docs" / "pictures"
SOURCES = {"paper": GREY, "honest": BLUE, "fit": ORANGE}
COLOURS = dict(zip(STRATEGIES, (INK, BLUE, VERMILION, GREEN, PURPLE), strict=True))
Row = dict[str, Any]
Document = Mapping[str, Any]


def cells(document: Document, model: str, quantity: str) -> list[Row]:
    """A row of Table I, in the order of STRATEGIES that it has."""
    rows = {row["strategy"]: row for row in document["table"] if (row["model"], row["quantity"]) == (model, quantity)}
    return [rows[strategy] for strategy in STRATEGIES if strategy in rows]


def bars(axes: Any, document: Document, model: str, quantity: str) -> None:
    """One group per strategy, one bar per source."""
    rows = cells(document, model, quantity)
    for place, (source, colour) in enumerate(SOURCES.items()):
        values = [row[source] or 0.0 for row in rows]
        if any(values):
            axes.bar([number + 0.27 * (place - 1) for number in range(len(rows))], values, 0.25, color=colour, label=source)
    axes.set_xticks(range(len(rows)), [row["strategy"] for row in rows])
    axes.set_title(model, fontsize=9.5)


def figure_1(axes: Sequence[Any], document: Document) -> None:
    for place, model in zip(axes, MODELS, strict=True):
        bars(place, document, model, "hours")
    axes[0].set_ylabel("hours of 100 epochs")


def figure_2(axes: Sequence[Any], document: Document) -> None:
    for place, model in zip(axes, MODELS, strict=True):
        hours = {row["strategy"]: row["paper"] for row in cells(document, model, "hours")}
        for strategy in STRATEGIES[1:]:
            own = [row for row in document["scaling"] if (row["model"], row["strategy"]) == (model, strategy)]
            xs, ys = [row["gpus"] for row in own], [row["speedup"] for row in own]
            place.plot(xs, ys, color=COLOURS[strategy], marker="o", ms=3, label=f"{strategy}, honest")
            place.plot([8], [hours["single"] / hours[strategy]], "x", color=COLOURS[strategy], label=f"{strategy}, paper")
        place.plot([1, 8], [1, 8], color=GREY, ls=":", lw=1)
        place.set_xticks([1, 2, 4, 8])
        place.set_xlabel("GPUs")
        place.set_title(model, fontsize=9.5)
    axes[0].set_ylabel("speed over one GPU")


def figure_3(axes: Sequence[Any], document: Document) -> None:
    for place, model in zip(axes, MODELS, strict=True):
        rows = cells(document, model, "communication")
        for offset, source in enumerate(SOURCES):
            xs = [number + 0.27 * (offset - 1) for number in range(len(rows))]
            shares = [100 * (row[source] or 0.0) for row in rows]
            place.bar(xs, [100 - share for share in shares], 0.25, color=SOURCES[source], alpha=0.35)
            place.bar(xs, shares, 0.25, bottom=[100 - share for share in shares], color=SOURCES[source], label=source)
        place.set_xticks(range(len(rows)), [row["strategy"] for row in rows])
        place.set_title(model, fontsize=9.5)
    axes[0].set_ylabel("% of the time: computation pale,\ncommunication dark")


def figure_4(axes: Sequence[Any], document: Document) -> None:
    for place, key, label in zip(axes, ("epochs", "simulated_s"), ("epochs", "simulated seconds"), strict=True):
        for number, strategy in enumerate(STRATEGIES):
            own = [row for row in document["curves"] if row["strategy"] == strategy]
            xs, ys = [row[key] for row in own], [100 * row["accuracy"] for row in own]
            width = 5 - number if key == "epochs" else 1.5  # equal curves lie on one another
            place.plot(xs, ys, color=COLOURS[strategy], lw=width, label=strategy)
        place.set_xlabel(label)
    axes[0].set_ylabel("test accuracy, % (digits)")


def figure_5(axes: Sequence[Any], document: Document) -> None:
    for place, model in zip(axes, MODELS, strict=True):
        bars(place, document, model, "memory_gb")
    axes[0].set_ylabel("peak memory of a GPU, GB")


def figure_6(axes: Sequence[Any], document: Document) -> None:
    colours = {"dp": BLUE, "mp": VERMILION, "hp": GREEN}
    for place, model in zip(axes, MODELS, strict=True):
        for line, (_, chosen) in enumerate(placements(document, model)):
            for number, choice in enumerate(chosen):
                place.barh(line, 1, left=number, color=colours.get(choice, "#e8eaed"), edgecolor="white")
        place.set_yticks(range(3), [name for name, _ in placements(document, model)])
        place.set_xlabel("components, first to last")
        place.set_title(model, fontsize=9.5)
    for name, colour in (colours | {"not told": "#e8eaed"}).items():
        axes[0].bar(0, 0, color=colour, label=name)


def placements(document: Document, model: str) -> list[tuple[str, list[str]]]:
    """What each component gets: as the paper says of ViT, by its objective with its constants, and on honest V100s."""
    chosen = {row["component"]: row["choice"] for row in document["choices"] if row["model"] == model}
    (improved,) = [row for row in document["reading"] if (row["model"], row["problem"]) == (model, "improved")]
    honest = {name: "dp" if text == "batch" else "mp" for name, text in improved["placements"].items()}
    said = {"attention": "mp", "MLP": "dp", "embedding": "hp"}
    told = [said.get(kind_of(name), "not told") for name in chosen] if model == "ViT-B/16" else []
    return [("honest", list(honest.values())), ("fit", list(chosen.values())), ("paper", told)]


FIGURES: dict[int, tuple[str, Callable[[Sequence[Any], Document], None]]] = {
    1: ("Training time", figure_1),
    2: ("Speed by the number of GPUs", figure_2),
    3: ("Computation and communication", figure_3),
    4: ("Accuracy on the way", figure_4),
    5: ("Peak memory", figure_5),
    6: ("Strategy of each component", figure_6),
}


def draw(document: Document, folder: Path) -> list[Path]:
    """The six figures as SVG, without a date in them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    paths = []
    for number, (title, fill) in FIGURES.items():
        with mpl.rc_context(LOOK):
            picture = Figure(figsize=(10, 3.4), layout="constrained")
            axes = picture.subplots(1, 2, sharey=number == 4)
            fill(axes, document)
            for place in axes:
                place.spines[["top", "right"]].set_visible(False)
            handles, labels = axes[0].get_legend_handles_labels()
            picture.legend(handles, labels, loc="outside right center", frameon=False)
            picture.suptitle(f"Figure {number}: {title}", x=0.01, ha="left", fontsize=11)
            path = folder / f"paper-{number}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = io.BytesIO()
            picture.savefig(drawn, format="svg", metadata={"Date": None})
        write_text_atomically(path, drawn.getvalue().decode())
        paths.append(path)
    return paths


def table_one(document: Document) -> str:
    """Every cell of Table I beside ours."""
    rows = []
    for model in MODELS:
        for quantity, name, text in (
            ("hours", "hours of 100 epochs", "{:.2f}"),
            ("communication", "communication", "{:.1%}"),
            ("memory_gb", "peak memory, GB", "{:.1f}"),
        ):
            for row in cells(document, model, quantity):
                shown = {source: "" if row[source] is None else text.format(row[source]) for source in SOURCES}
                rows.append(row | shown | {"quantity": name, "verdict": verdict_of(row)})
        final = {row["strategy"]: row["accuracy"] for row in document["curves"]}  # the last of each
        for strategy, printed in zip(STRATEGIES, document["printed"][model]["accuracy"], strict=True):
            here = {"here": f"{100 * final[strategy]:.1f} (digits)", "honest": "", "fit": "", "verdict": ""}
            rows.append({"model": model, "strategy": strategy, "quantity": "accuracy, %", "paper": f"{printed:.1f}"} | here)
    columns = [(key, f"{{{key}}}") for key in ("model", "strategy", "quantity", "paper", "honest", "fit")]
    measured = ("trained here", lambda row: row.get("here", ""))
    return row_table(rows, [*columns, measured, ("verdict", "{verdict}")])


REDUCTION_COLUMNS = (
    ("model", "{model}"),
    ("gradients summed as", "{way}"),
    ("hours of 100 epochs", "{hours:.3f}"),
    ("exposed communication", "{communication:.2%}"),
    ("all communication", "{communication_busy:.2%}"),
    ("peak memory, GB", "{memory_gb:.1f}"),
    ("plan", "`{plan}`"),
)


def page(document: Document, text: str) -> str:
    """docs/paper.md with the tables of this document."""
    text = replaced(text, "<!-- table one: begin -->", "<!-- table one: end -->", table_one(document))
    ways = row_table(document["reduction"], REDUCTION_COLUMNS, words=2)
    return replaced(text, "<!-- reduction: begin -->", "<!-- reduction: end -->", ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="compute what the figures of times and memory show first")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder of paper.md and of pictures/")
    options = parser.parse_args()
    document = recorded("adaptive_parallelism") or {}
    if options.again:
        from experiments.adaptive.adaptive_parallelism import made

        document |= made("table", False, Path())
    text = page(document, PAGE.read_text(encoding="utf-8"))
    write_text_atomically(options.out / "paper.md", text)
    for path in draw(document, options.out / "pictures"):
        print(path)


if __name__ == "__main__":
    main()
