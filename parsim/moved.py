"""Modules that have another name than before: importing one by its old name says where it is now.

Only asked where an import fails: nothing that exists is shadowed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVES = (
    (
        "parsim.model",
        "parsim.model.tracing",
        "cut half_precision measure operators recorder recording sublayers trace traced",
    ),
    (
        "parsim.model",
        "parsim.model.shard",
        "content divisions narrow pieces propagation sharded variants shard_moves=moves shard_peaks=peaks shard_rules=rules",
    ),
    ("parsim.model.tracing", "parsim.model.trace.checks", "unsupported refusals=messages"),
    ("parsim.model", "parsim.model.autograd", "autograd_cut=cut autograd_halves=halves autograd_recompute=recompute"),
    ("parsim.model", "parsim.model.memory", "live_memory peaks"),
    (
        "parsim.costs",
        "parsim.costs.compute",
        "composition cuda_launches interpolation launches operators surfaces",
    ),
    (
        "parsim.costs",
        "parsim.costs.communication",
        "collectives exchange internode linkgraph overlap rings traffic transfers alike=equivalent_groups "
        "forms=alpha_beta inside=intranode",
    ),
    ("parsim.costs", "parsim.costs.uncertainty", "conformal"),
    ("parsim.costs", "parsim.costs.feedback", "history corrected=run_corrections"),
    ("parsim.plan", "parsim.plans", "concurrent mesh pipeline placement plan recompute layout=redistribution"),
    ("parsim.graph", "parsim.graph", "draft=graph_builder holding=parameter_buckets layout=plan_index"),
    ("parsim.simulate", "parsim.engines", "boundary compile deadlock dynamic instants kernels program static steps"),
    (
        "parsim.simulate",
        "parsim.engines.scenario",
        "asynchronous checkpointing conditions controlled course failures flows maxmin paces scenario whole_run",
    ),
    (
        "parsim.schedule",
        "parsim.predict",
        "evaluate forecast result speed kept=kept_activations memory=plan_memory problem=planning_problem "
        "unsharded=unsharded_memory",
    ),
    ("parsim.schedule", "parsim.schedule", "quick=branch_and_bound closed_form=branch_and_bound"),
    ("parsim.schedule", "parsim.schedule.recomputation", "relief=to_fit choose_recompute=to_fit"),
    ("parsim.schedule.parts", "parsim.schedule.recomputation", "least_kept"),
    (
        "parsim.schedule",
        "parsim.schedule.placement",
        "brute_force exact milp objective relaxation paper=paper_formulation placing=placement_problem",
    ),
    (
        "parsim.schedule",
        "parsim.schedule.live",
        "updating adaptive=controller adaptive_driver=driver adaptive_planning=planning adaptive_scenario=scenario",
    ),
    (
        "parsim.algorithms",
        "parsim.engines.relaxed",
        "gossip_program decoupled_program merge_program programs=decoupled_program",
    ),
    (
        "parsim.execute",
        "parsim.execute.processes",
        "environment group launch machine_state pinning priority same_machine probe=speed_probe",
    ),
    ("parsim.execute", "parsim.execute.state", "checkpoint fragments optimizer reshard store zero"),
    ("parsim.execute", "parsim.execute.records", "measurement memory_lines"),
    ("parsim", "parsim.workflow", "config doctor toml_text"),
    ("parsim.commands", "parsim.workflow", "question=load workflow=ask"),
    (
        "parsim.commands",
        "parsim.workflow.folders",
        "run_folder write_report folder=write_prediction recording=record_validation",
    ),
    (
        "calibration",
        "calibration.measure",
        "communication_points operator_shapes measure_allocator=allocator measure_collectives=collectives "
        "measure_components=components measure_crowding=core_sharing measure_device=device "
        "measure_operators=operators measure_overlap=overlap measure_resume=post_wait measure_shards=shards "
        "pausing=delayed_streams",
    ),
    (
        "calibration",
        "calibration.fit",
        "build_profile drift fit_composition=composition fit_links=links "
        "fit_operators=operators fit_surfaces=surfaces screen=reject_outliers",
    ),
    (
        "calibration",
        "calibration.rounds",
        "calibrate pace raw_points refresh request turns leftover=resume_folder pacing=speed_probe surroundings=environment",
    ),
    (
        "calibration",
        "calibration.published",
        "v100 v100_collectives v100_links v100_machines v100_throughput published_models=models",
    ),
    ("calibration", "parsim.costs.communication", "fit_collectives=regime_fits"),
    ("calibration.fit", "parsim.costs.communication", "collectives=regime_fits"),
    ("parsim.workflow", "parsim.workflow.folders", "import_folder"),
    ("parsim", "parsim", "plan=plans simulate=engines"),
)
"""Old package, new package, and the modules that went from one to the other: NAME, or OLD=NEW."""


def _table() -> dict[str, str]:
    found: dict[str, str] = {}
    for old, new, names in _MOVES:
        for name in names.split():
            before, _, after = name.partition("=")
            found[f"{old}.{before}"] = f"{new}.{after or before}"
    return found


MOVED = _table()
"""Old name of a module -> the name it has now."""


class _MovedModules:
    """The last finder that Python asks: it finds nothing, and says so better for a name of MOVED."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError with the new name of a module that has moved."""
        if fullname in MOVED:
            raise ModuleNotFoundError(f"{fullname} is now {MOVED[fullname]}; import it by that name", name=fullname)
        return None


def announce_moves() -> None:
    """From now on an import by an old name fails with the new one."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
