"""What loading costs a question: timed on this machine where its dataset is the user's own.

Shipped datasets are priced by the profile: `parsim calibrate` times them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

from parsim.costs.loading import MeasuredLoading, OwnLoading, UnmeasuredLoading
from parsim.data import DATASETS
from parsim.errors import ParsimError
from parsim.execute.processes.same_machine import is_from_here
from parsim.predict.evaluate import evaluate
from parsim.workflow.config import RunConfig
from parsim.workflow.progress import progress
from parsim.workflow.public.prediction import Prediction

if TYPE_CHECKING:
    from parsim.data import Order, Samples
    from parsim.hardware.cluster import Cluster
    from parsim.workflow.question import Question


def loading_of(question: Question, cluster: Cluster, *, runs_here: bool) -> OwnLoading | None:
    """Time the question's dataset, if it is the user's own and this is the machine that is asked about.

    Args:
        cluster: of the question. runs_here: it will run on this machine, whatever profile its cluster has.
    """
    config = question.config
    if not DATASETS[config.training.dataset].is_own:
        return None
    if question.given != "name":
        return UnmeasuredLoading(reason="the model was given as a value, and data are read for one that a run can build")
    if not runs_here and not (cluster.network is None and is_from_here(cluster.profile)):
        return UnmeasuredLoading(reason=f"profile {cluster.profile.name} is of another machine")
    return measured_loading(config, cluster)


def with_loading(asked: Prediction) -> Prediction:
    """The prediction of a plan that will run here, with its dataset timed where it was not yet."""
    config, problem = asked.config, asked.problem
    known = problem.loading
    is_known = isinstance(known, MeasuredLoading) or (known is not None and known.tried)
    if is_known or not DATASETS[config.training.dataset].is_own:
        return asked
    problem = replace(problem, loading=measured_loading(config, problem.cluster))
    result = asked.evaluation.result
    return replace(asked, problem=problem, evaluation=evaluate(problem, result.plan, reason=result.reason))


def measured_loading(config: RunConfig, cluster: Cluster) -> OwnLoading:
    """Read batches of the dataset as the ranks will: one process per rank and core, or as many with their workers."""
    if importlib.util.find_spec("torch") is None:
        return UnmeasuredLoading(reason="torch is not installed here")
    import torch

    from parsim.execute.processes.pinning import available_cores
    from parsim.execute.training.load_timing import ReaderRequest, timed_loading
    from parsim.workflow.training.check import training_data

    training = config.training

    def load() -> tuple[Samples, Order]:
        data, _, order = training_data(config)
        return data, order

    request = ReaderRequest(
        load=load,
        dtype=getattr(torch, training.dtype),
        global_batch=training.global_batch,
        readers=max(1, min(cluster.size, len(available_cores()), training.global_batch)),
        workers=training.workers,
        device=cluster.devices[0].type.kind,
    )
    with progress(f"Timing the loading of {training.dataset}"):
        try:
            return timed_loading(request)
        except ParsimError as error:
            return UnmeasuredLoading(reason=str(error), tried=True)
