"""Claims of predictions for V100s, from results.json."""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.common.claims import Claim, claim
from experiments.common.markdown import table

WORST, MEDIAN, EIGHT = 15.0, 8.0, 5.0


def claims(document: dict[str, Any]) -> list[Claim]:
    """One GPU from operators alone, and eight GPUs by the shipped profile.

    Args:
        document: results.json; an empty one compares nothing.
    """
    single = [percent(row["error"]) for row in document.get("single_gpu", [])]
    eight = [row for row in document.get("eight_gpus", []) if row["profile"] == "with the efficiency"]
    errors = [percent(row["error"]) for row in eight]
    return [
        claim(
            f"One GPU, no row of a whole model used: the worst case is at most {WORST:.0f}% off",
            None if not single else max(single) <= WORST,
            f"{max(single):.1f}% of {len(single)} cases" if single else "",
        ),
        claim(
            f"One GPU, no row of a whole model used: the median is at most {MEDIAN:.0f}%",
            None if not single else median(single) <= MEDIAN,
            f"{median(single):.1f}%" if single else "",
        ),
        claim(
            f"Throughput of eight GPUs is at most {EIGHT:.0f}% off",
            None if not errors else max(errors) <= EIGHT,
            ", ".join(f"{row['model']} {row['error']}" for row in eight),
        ),
    ]


def percent(text: str) -> float:
    """The size of an error from its text."""
    return abs(float(str(text).replace("−", "-").rstrip("%")))


def named_tables(document: dict[str, Any]) -> dict[str, str]:
    """Throughput of one and eight GPUs, and collectives, as Markdown, by the name in the marks of the README.

    Args:
        document: results.json.
    """
    shipped = "with the efficiency"
    cases = [
        (
            row["model"],
            row["precision"],
            *(
                str(row[key])
                for key in ("batch", "rows", "published_per_s", "operators alone", "error", shipped, "error with it")
            ),
        )
        for row in document["single_gpu"]
    ]
    keys = ("cases", "median, operators alone", "worst", f"median, {shipped}", "worst with it")
    summary = [(row["model"], row["precision"], *(str(row[key]) for key in keys)) for row in document["single_gpu_summary"]]
    efficiencies = ("published efficiency", "predicted efficiency", "no communication")
    eight = [
        (
            "shipped" if row["profile"] == shipped else row["profile"],
            row["model"],
            *(f"{row[key]:.1f}" for key in ("published_per_s", "predicted_per_s")),
            row["error"],
            f"{row['no communication_per_s']:.1f}",
            *(row[key] for key in efficiencies),
            *(f"{row[key]} ms" for key in ("all_reduce_ms", "exposed_ms")),
        )
        for row in document["eight_gpus"]
    ]
    collectives = [
        (row["where"], row["operation"], str(row["gpus"]), row["size"], str(row["rows"]), row["median error"], row["worst"])
        for row in document["collectives"]
    ]
    one = ("model", "precision", "batch", "rows", "published/s", "operators alone", "error", "shipped profile", "error")
    all_cases = ("model", "precision", "cases", "median, operators alone", "worst", "median, shipped profile", "worst")
    speeds = ("published/s", "predicted/s", "error", "without communication")
    return {
        "one GPU": table(one, cases, words=2),
        "one GPU, summary": table(all_cases, summary, words=2),
        "eight GPUs": table(("profile", "model", *speeds, *efficiencies, "all_reduce", "exposed"), eight, words=2),
        "collectives": table(("machine", "operation", "GPUs", "size", "rows", "median error", "worst"), collectives, words=2),
    }
