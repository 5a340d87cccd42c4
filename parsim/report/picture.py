"""Pictures in files: a figure of `parsim.report.figures`, drawn by matplotlib as PNG, SVG or PDF. No browser is started.

Drawn are the traces that parsim's figures have: bars, and curves with markers and error bars, in one or more panels.
"""

from __future__ import annotations

import html
import importlib.util
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError, MissingDependencyError
from parsim.files import write_atomically
from parsim.report.legend import CLEAR, INK

if TYPE_CHECKING:
    import plotly.graph_objects as go

PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")
WIDTH_PX = 1000
PIXELS_PER_INCH = 100
SHARPNESS = 1.6
"""Pixels of a PNG for each pixel of the figure."""
SOFT, LINE = "#52606d", "#dde2e8"
LOOK: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "parsim",
    "svg.fonttype": "none",
}
TITLE_LETTERS, LETTER_PX = 104, 6.0
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
    "star": "*",
    "line-ew": "_",
}
DASHES = {None: "-", "solid": "-", "dot": ":", "dash": "--"}


def checked_ending(path: str | Path, endings: Sequence[str], what: str = "picture") -> Path:
    """The path of a picture or page to write. Raises ConfigError: its ending is none of `endings`, or it is a folder."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the {what} a name, such as {path / f'{what}{endings[0]}'}")
    if path.suffix.lower() not in endings:
        named = f"ends in {path.suffix!r}" if path.suffix else "has no ending"
        other = f"; a {path.suffix.lower()} file is drawn by --plot" if path.suffix.lower() in PICTURES else ""
        raise ConfigError(
            f"{path} {named}, and the ending decides what a {what} is written as: {', '.join(endings)}; for example "
            f"{path.with_suffix(endings[0]).name}{other}"
        )
    return path


def plotted(figure: go.Figure, title: str, path: str | Path | None = None) -> Any:
    """The figure as a `matplotlib.figure.Figure`, or as it is where matplotlib is not installed; with a path also as a file.

    Raises: ConfigError: the path does not end in .png, .svg or .pdf. MissingDependencyError: a path, and no matplotlib.
    """
    where = None if path is None else checked_ending(path, PICTURES)
    if importlib.util.find_spec("matplotlib") is None:
        if where is not None:
            raise MissingDependencyError(f"{where.name} is drawn by matplotlib, which is not installed: pip install matplotlib")
        return figure.update_layout(title={"text": html.escape(title)}, margin_t=60, showlegend=True)
    picture = drawn(figure, title)
    if where is not None:
        import matplotlib as mpl

        kind = where.suffix.lower().lstrip(".")
        dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]  # one figure, one file: no time in it
        where.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(LOOK):
            write_atomically(
                where, lambda file: picture.savefig(file, format=kind, dpi=SHARPNESS * PIXELS_PER_INCH, metadata=dated)
            )
    return picture


def drawn(figure: go.Figure, title: str) -> Any:
    """A `matplotlib.figure.Figure` of a plotly figure, under a title and its legend."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    layout, lines = figure.layout, textwrap.wrap(title, TITLE_LETTERS)
    names = list(dict.fromkeys(trace.name for trace in figure.data if trace.name))
    legend_rows = -(-sum(len(name) + 8 for name in names) // 120) if len(names) > 1 else 0
    head = 22 * len(lines) + 22 * legend_rows + 10
    size = (WIDTH_PX / PIXELS_PER_INCH, (layout.height + head) / PIXELS_PER_INCH)
    with mpl.rc_context(LOOK):
        picture = Figure(figsize=size, dpi=PIXELS_PER_INCH, facecolor="white", layout="constrained")
        top = 1 - head / (layout.height + head)
        layout_engine: Any = picture.get_layout_engine()
        layout_engine.set(rect=(0.005, 0.005, 0.98, top - 0.005))
        picture.text(0.012, 1 - 8 / (layout.height + head), "\n".join(lines), va="top", fontsize=11, fontweight="bold")
        handles: dict[str, Any] = {}
        for axes, traces, (across, up), heading in _panels(figure, picture):
            _draw_panel(axes, traces, across, up, layout, handles)
            axes.set_title(heading, loc="left", fontsize=10, color=INK)
        if len(handles) > 1:
            place = (0.008, 1 - (22 * len(lines) + 8) / (layout.height + head))
            picture.legend(
                handles.values(),
                handles,
                loc="upper left",
                bbox_to_anchor=place,
                frameon=False,
                fontsize=9,
                ncols=-(-len(handles) // legend_rows),
                columnspacing=1.4,
                handlelength=1.2,
                borderaxespad=0,
            )
    return picture


def _panels(figure: go.Figure, picture: Any) -> Iterable[tuple[Any, list[Any], tuple[Any, Any], str]]:
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for trace in figure.data:
        groups[trace.xaxis or "x", trace.yaxis or "y"].append(trace)
    layout = figure.layout
    of = {pair: (layout[f"xaxis{pair[0][1:]}"], layout[f"yaxis{pair[1][1:]}"]) for pair in groups}
    lefts = sorted({(across.domain or (0, 1))[0] for across, _ in of.values()})
    tops = sorted({(up.domain or (0, 1))[1] for _, up in of.values()}, reverse=True)
    places = picture.add_gridspec(len(tops), len(lefts))
    headings = [_plain(note.text) for note in layout.annotations]
    shared: Any = None
    for number, (pair, traces) in enumerate(groups.items()):
        across, up = of[pair]
        row, column = tops.index((up.domain or (0, 1))[1]), lefts.index((across.domain or (0, 1))[0])
        axes = picture.add_subplot(places[row, column], sharex=shared if len(lefts) == 1 else None)
        shared = shared or axes
        if len(lefts) == 1 and row < len(tops) - 1:
            axes.tick_params(labelbottom=False)
        yield axes, traces, (across, up), headings[number] if number < len(headings) else ""


def _draw_panel(axes: Any, traces: Sequence[Any], across: Any, up: Any, layout: Any, handles: dict[str, Any]) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    for name, settings in (("x", across), ("y", up)):
        if settings.showgrid is not False:
            axes.grid(axis=name, color=LINE, linewidth=0.7)
    stacked: dict[float, float] = defaultdict(float)
    bars = [trace for trace in traces if trace.type == "bar"]
    places = {"x": _places(traces, "x"), "y": _places(traces, "y")}
    for name, axis, settings in (("x", axes.xaxis, across), ("y", axes.yaxis, up)):
        _scale_axis(axes, name, axis, settings, places[name])
    for trace in traces:
        name = trace.name or ""
        if trace.type == "bar":
            handle = _bars(axes, trace, bars.index(trace), len(bars), layout, stacked, places)
        else:
            handle = _curve(axes, trace, places)
        if name:
            handles.setdefault(name, handle)
    axes.autoscale_view()
    for name, settings in (("x", across), ("y", up)):
        limits = getattr(axes, f"set_{name}lim")
        if settings.range is not None:
            limits(*settings.range)
        elif settings.rangemode == "tozero" and settings.type != "log":
            limits(**{"left" if name == "x" else "bottom": 0})
        if settings.autorange == "reversed":
            getattr(axes, f"invert_{name}axis")()
    for line in up.minor.tickvals if up.minor.tickvals is not None else ():
        axes.axhline(line, color="#c3cad2", linewidth=0.7, zorder=0.5)
    if across.zeroline and across.zerolinecolor:
        axes.axvline(0, color=across.zerolinecolor, linewidth=1.2)
    _bar_texts(axes, bars, places)


def _places(traces: Sequence[Any], name: str) -> dict[str, int]:
    """Where each word of an axis of words stands; empty for an axis of numbers."""
    values = [value for trace in traces for value in (() if trace[name] is None else trace[name])]
    words = list(dict.fromkeys(value for value in values if isinstance(value, str)))
    return {word: number for number, word in enumerate(words)}


def _numbers(values: Any, places: dict[str, int]) -> list[float]:
    return [places[value] if isinstance(value, str) else float("nan") if value is None else float(value) for value in values]


def _scale_axis(axes: Any, name: str, axis: Any, settings: Any, places: dict[str, int]) -> None:
    if settings.type == "log":
        getattr(axes, f"set_{name}scale")("log")
    if settings.title.text:
        getattr(axes, f"set_{name}label")(_plain(settings.title.text))
    ticks, texts = settings.tickvals, settings.ticktext
    if ticks is None and places:
        ticks, texts = list(places.values()), list(places)
    if ticks is not None:
        axis.set_ticks(list(ticks), [_plain(str(text)) for text in (ticks if texts is None else texts)], minor=False)
        axis.set_ticks([], minor=True)
    elif settings.ticksuffix:
        suffix = settings.ticksuffix
        axis.set_major_formatter(lambda value, _: f"{value:g}{suffix}")


def _bars(
    axes: Any, trace: Any, number: int, count: int, layout: Any, stacked: dict[float, float], places: dict[str, dict[str, int]]
) -> Any:
    """One trace of bars as rectangles of one collection; returns what stands for it in the legend."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    flat = trace.orientation == "h"
    at, length = ("y", "x") if flat else ("x", "y")
    middles, lengths = _numbers(trace[at], places[at]), _numbers(trace[length], places[length])
    bases = [0.0] * len(lengths) if trace.base is None else _numbers(trace.base, {})
    width = trace.width if isinstance(trace.width, int | float) else 1 - (layout.bargap or 0.2)
    if layout.barmode == "group":
        width /= count
        middles = [middle + (number - (count - 1) / 2) * width for middle in middles]
    if layout.barmode == "stack":
        bases = [stacked[middle] for middle in middles]
        for middle, size in zip(middles, lengths, strict=True):
            stacked[middle] += size
    corners = []
    for middle, base, size in zip(middles, bases, lengths, strict=True):
        low, high = middle - width / 2, middle + width / 2
        corner = [(base, low), (base + size, low), (base + size, high), (base, high)]
        corners.append(corner if flat else [(second, first) for first, second in corner])
    marker = trace.marker
    pattern = {"hatch": "////", "edgecolor": marker.pattern.fgcolor} if marker.pattern.shape == "/" else {"edgecolor": "none"}
    edge = pattern if trace.text is None or marker.pattern.shape else {"edgecolor": "white"}
    axes.add_collection(PolyCollection(corners, facecolor=marker.color, linewidth=marker.line.width or 0.0, **edge))
    bars = trace.error_x if flat else trace.error_y
    if bars.array is not None:
        ends = [base + size for base, size in zip(bases, lengths, strict=True)]
        _error_bars(axes, (ends, middles) if flat else (middles, ends), trace.error_x, trace.error_y)
    return Patch(facecolor=marker.color, **pattern, linewidth=0.0)


def _bar_texts(axes: Any, bars: Sequence[Any], places: dict[str, dict[str, int]]) -> None:
    """Labels inside bars that have room for them, once the limits of the axis are known."""
    low, high = axes.get_xlim()
    px = (WIDTH_PX - 120) / abs(high - low)
    for trace in bars:
        if trace.text is None or trace.textposition != "inside" or trace.base is None:
            continue
        for middle, base, size, text in zip(_numbers(trace.y, places["y"]), trace.base, trace.x, trace.text, strict=True):
            if text and px * size > LETTER_PX * len(text) + 2:
                shade = "white" if _is_dark(trace.marker.color) else INK
                settings: dict[str, Any] = {"fontsize": 7, "color": shade}
                if trace.marker.pattern.shape:
                    settings |= {"fontsize": 9, "bbox": {"facecolor": trace.marker.color, "edgecolor": "none", "pad": 1}}
                axes.text(base + size / 2, middle, html.unescape(text), ha="center", va="center", **settings)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def _curve(axes: Any, trace: Any, places: dict[str, dict[str, int]]) -> Any:
    from matplotlib.lines import Line2D

    x, y, mode = _numbers(trace.x, places["x"]), _numbers(trace.y, places["y"]), trace.mode or "lines"
    colour = trace.line.color or trace.marker.line.color or trace.marker.color or INK
    marker = trace.marker
    style: dict[str, Any] = {"color": colour, "linestyle": DASHES[trace.line.dash] if "lines" in mode else "none"}
    style |= {"linewidth": trace.line.width or 1.5}
    if "markers" in mode:
        style |= {"marker": MARKERS[marker.symbol or "circle"], "markersize": 0.7 * (marker.size or 6)}
        style |= {"markerfacecolor": "none" if marker.color == CLEAR else marker.color or colour}
        style |= {"markeredgecolor": marker.line.color or colour, "markeredgewidth": marker.line.width or 0}
    _error_bars(axes, (x, y), trace.error_x, trace.error_y)
    axes.plot(x, y, **style)
    return Line2D([], [], **style)


def _error_bars(axes: Any, at: tuple[Sequence[float], Sequence[float]], across: Any, up: Any) -> None:
    for name, bars in (("xerr", across), ("yerr", up)):
        if bars.array is not None:
            reach = [list(bars.arrayminus), list(bars.array)]
            axes.errorbar(*at, **{name: reach}, fmt="none", ecolor=bars.color, elinewidth=1.1, capsize=(bars.width or 0) / 1.6)


def _plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text.replace("<br>", "\n")))
