"""`parsim plan`: ranked plans with intervals and memory, the choice, and why the others lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from parsim.commands.output import JsonFlag, Overrides, RunFile, print_json, print_tables, progress
from parsim.errors import ScheduleError
from parsim.files import write_text_atomically
from parsim.units import format_bytes, format_percent, format_seconds
from parsim.workflow.config import load_config
from parsim.workflow.load import fixed_plan, problem_of, search_plans


def plan(
    run_file: RunFile,
    overrides: Overrides = None,
    top: Annotated[int | None, typer.Option(min=1, help="Show the K fastest plans instead of each family's best.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the chosen plan here.")] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Solve the placement problem by a MILP too, and show both optima.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rank the plans of the strategy that the file names, choose one, and say why the others lost."""
    from parsim.report.tables import strategy_table

    config = load_config(run_file, overrides or [])
    with progress(f"Loading {config.model.name} and {config.cluster.profile}"):
        problem = problem_of(config)
    with progress("Pricing and simulating plans"):
        given = fixed_plan(problem, config)
        found = search_plans(problem, config, top=top) if given is None else None
        document = _only(problem, given) if found is None else found.to_dict()
    if certify:
        from parsim.schedule.certify import certificate_of

        with progress("Certifying placements"):
            document["certificate"] = certificate_of(problem, found, config.plan.strategy)
    if out is not None:
        if document["chosen"] is None:
            raise ScheduleError(f"no plan fits, so {out} is not written; {document['candidates'][0]['reason']}")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out, json.dumps(document["chosen"]["plan"], indent=1) + "\n")
    if as_json:
        print_json(document)
        return
    title = f"{problem.model.name} on {problem.cluster.name}, {problem.cluster.size} devices, batch {problem.global_batch}"
    chosen = document["chosen"]
    mark = None
    if chosen is not None:
        same = [{**candidate["plan"], "strategy": ""} for candidate in document["candidates"]]
        mark = document["candidates"][same.index({**chosen["plan"], "strategy": ""})]
    print_tables([strategy_table(document["candidates"], chosen=mark, title=title)])
    for name, why in document["skipped"].items():
        print(f"{name}: {why}")
    print(_verdict(document))
    if certify:
        from parsim.schedule.placement.certificate import certificate_text

        print(certificate_text(document["certificate"]))


def _only(problem: Any, plan: Any) -> dict[str, Any]:
    """A plan written by hand, as the search would show it."""
    from parsim.predict.evaluate import evaluate

    result = evaluate(problem, plan, reason="the plan that was asked for").result
    median = result.step_s.median
    return {
        "candidates": [result.to_dict()],
        "chosen": result.to_dict() if result.fits else None,
        "status": "given" if result.fits else "infeasible",
        "lower_bound_s": result.lower_bound_s,
        "gap": max(0.0, (median - result.lower_bound_s) / median) if result.fits and median else 1.0,
        "judged": 1,
        "skipped": {},
    }


def _verdict(document: dict[str, Any]) -> str:
    chosen = document["chosen"]
    if chosen is None:
        nearest = min(document["candidates"], key=lambda candidate: max(candidate["peak_memory_bytes"]))
        return (
            f"No plan fits. The nearest is {nearest['plan_summary']}: devices of "
            f"{format_bytes(max(nearest['peak_memory_bytes']))} would do; or use more devices, a smaller batch, or a higher "
            "zero_stage (3 divides all that can be)."
        )
    return (
        f"Chosen: {chosen['plan_summary']}, {format_seconds(chosen['step_s']['median'])} per step. "
        f"Status {document['status']}; {document['judged']} plans judged; none of them can take less than "
        f"{format_seconds(document['lower_bound_s'])} (gap {format_percent(document['gap'])}).{_placements(document)}"
    )


def _placements(document: dict[str, Any]) -> str:
    """How the solver of placements vouches for the best one on a single stage."""
    solved = [entry for entry in document.get("placements", ()) if entry["seconds"] is not None]
    if not solved:
        return ""
    best = min(solved, key=lambda entry: float(entry["seconds"]))
    return (
        f"\nPlacements of single components on one stage: {best['status']}, {format_seconds(best['seconds'])} under the cost "
        f"model, gap {format_percent(best['gap'])}."
    )
