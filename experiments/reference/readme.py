"""README.md of this experiment, made from its results."""

from __future__ import annotations

from typing import Any

LIMIT, RECORDING_LIMIT, EQUAL = 1.05, 1.02, 1e-10

TEXT = """# The executor beside PyTorch's own parallel modules

{finding}

One plan per row, on two CPU processes over gloo, with a core and a thread each.

- *Difference*: the largest of any weight after {equal_steps} float64 steps, relative to the largest weight of its array.
- *Ratio*: the step of parsim's executor over the native one, paired within each of {rounds} rounds of {steps} steps. The
  median, and its 95% interval by the bootstrap over rounds, as in the later columns.
- *CPU*: the same ratio of the processor seconds of both ranks, which other programs disturb less.
- *Recording*: a step over one that reads no clock and keeps no times, alternately in one executor. The median of all
  pairs, and its interval by the bootstrap over rounds.
- *A/A*: a second native step over the first, in the same rounds.

| case | difference | ours, ms | native, ms | ratio (95%) | < {limit} | CPU (95%) | recording | < {recording_limit} | A/A |
|---|---|---|---|---|---|---|---|---|---|
{rows}

{machine}, torch {torch}, {date}, load average {load} (two ranks make 2 of it).
`python experiments/reference/run.py` measures all of it again and writes this page.

Not measured: NCCL (no GPU was there), loading, and interleaved and zero-bubble orders (torch's need several modules per rank).

**What would refute it**: an interval of the ratio above {limit} on a quiet machine, or a difference of more than {equal:g}.
"""


def readme(results: dict[str, Any]) -> str:
    """The page."""
    return TEXT.format(
        finding=_finding(results["rows"]),
        rows="\n".join(_row(row) for row in results["rows"]),
        limit=LIMIT,
        recording_limit=RECORDING_LIMIT,
        equal=EQUAL,
        **{key: results[key] for key in ("equal_steps", "rounds", "steps", "machine", "torch", "date", "load")},
    )


def _finding(rows: list[dict[str, Any]]) -> str:
    equal = sum(row["difference"] <= EQUAL for row in rows)
    fast = sum(row["ratio"]["high"] < LIMIT for row in rows)
    light = sum(row["recording"]["high"] < RECORDING_LIMIT for row in rows)
    return (
        f"{equal} of {len(rows)} plans train the weights of the native modules to {EQUAL:g}. The 95% interval of the step "
        f"ratio lies below {LIMIT} in {fast}, and that of recording below {RECORDING_LIMIT} in {light}."
    )


def _row(row: dict[str, Any]) -> str:
    ratio, recording = row["ratio"], row["recording"]
    cells = (
        row["case"],
        f"{row['difference']:.0e}",
        f"{row['parsim_ms']:.2f}",
        f"{row['native_ms']:.2f}",
        _interval(ratio),
        "yes" if ratio["high"] < LIMIT else "**no**",
        _interval(row["cpu_ratio"]) if "cpu_ratio" in row else "",
        _interval(recording),
        "yes" if recording["high"] < RECORDING_LIMIT else "**no**",
        _interval(row["floor"]),
    )
    return f"| {' | '.join(cells)} |"


def _interval(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
