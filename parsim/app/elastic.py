"""`--elastic`: a training whose rank dies goes on by itself, on the devices that are left.

The rule is a pure state machine (`Survivors`). A device is left out once it is lost, or once a rank on it has died twice.
Until then all go on with the same plan. With fewer devices the question is planned again for these. The training
goes on from its latest checkpoint, which any plan of the model can read. Every attempt is a launch of its own, with its
own store, so nobody finds the addresses of dead peers.

Leaves out: a launcher that dies. Start it again with --resume.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parsim.app.ask import answer_of, whole, with_every_rank
from parsim.app.config import PlanSection, Question
from parsim.app.doctor import warn
from parsim.app.launch import check_runnable
from parsim.app.load import cluster_of, problem_of
from parsim.app.measured import Measured
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RunFolder, forget_results, resumption
from parsim.errors import DoesNotFitError, ParsimError, PlanError, RankLostError
from parsim.units import format_seconds

TIMES_OUT = 2
"""Deaths of ranks on one device after which it is left out."""


@dataclass(slots=True)
class Survivors:
    """Which devices a training goes on with.

    Attributes:
        devices: numbers in the profile, by rank. deaths: of ranks, by device.
    """

    devices: tuple[int, ...]
    deaths: Counter[int] = field(default_factory=Counter)

    def after(self, ranks: Sequence[int], *, device_lost: bool) -> tuple[int, ...]:
        """The devices that are left after these ranks died; all of them where none would be left.

        Args:
            ranks: of the plan at hand. device_lost: their devices do not answer any more.
        """
        named = [self.devices[rank] for rank in ranks if rank < len(self.devices)]
        if len(named) < len(self.devices):  # where all hang, none is to blame
            self.deaths.update(named)
        out = {device for device in named if device_lost or self.deaths[device] >= TIMES_OUT}
        self.devices = tuple(device for device in self.devices if device not in out) or self.devices
        return self.devices


def restarting(
    attempt: Callable[[Prediction, bool, Sequence[str]], Measured],
    prediction: Prediction,
    folder: RunFolder,
    *,
    steps: int,
    max_restarts: int,
) -> Measured:
    """Train, and go on after ranks have died.

    Args:
        attempt: trains under a prediction, from the latest checkpoint if the second argument is true; the third: warnings.
        prediction: to begin with. folder: held by the caller. steps: of the whole training. max_restarts: how often.

    Raises:
        RankLostError: the last one, once there were too many. DoesNotFitError, PlanError: no plan on what is left.
    """
    survivors = Survivors(tuple(device.index for device in prediction.problem.cluster.devices))
    restarts: list[dict[str, Any]] = []
    warnings: list[str] = []
    while True:
        try:
            done = attempt(prediction, bool(restarts), warnings)
        except RankLostError as error:
            text = str(error).partition(" The checkpoint of step ")[0]
            if len(restarts) == max_restarts:
                more = f" It was restarted {max_restarts} times (--max-restarts)." if max_restarts else ""
                raise error.with_text(f"{error}{more}") from error
            begun_s = time.monotonic()
            before = prediction.plan
            devices = survivors.after(error.ranks, device_lost=error.device_lost)
            prediction = on_devices(prediction, devices)
            step, plan = resumption(folder, prediction.question, steps).step, prediction.plan
            if error.raised and restarts and restarts[-1]["step"] == step and restarts[-1]["failure"] == text:
                raise error.with_text(f"{error} It was restarted and failed in the same way.") from error
            planning_s = time.monotonic() - begun_s
            restart = {"failure": text, "ranks": list(error.ranks), "step": step, "devices": list(devices)}
            restarts.append(restart | {"plan": plan.summary(), "planning_s": planning_s})
            how = "under the same plan" if plan == before else f"on {len(devices)} devices under {plan.summary()}"
            warnings = [
                f"{text.rstrip('.')}. The training continues automatically from step {step}, {how} (restart {len(restarts)} of "
                f"at most {max_restarts}, decided in {format_seconds(planning_s)})"
            ]
            warn(warnings[0])
            forget_results(folder)
        else:
            return replace(done, document={**done.document, "restarts": restarts})


def on_devices(asked: Prediction, devices: Sequence[int]) -> Prediction:
    """A prediction on these devices of its cluster: itself, or that of a plan for fewer.

    A plan that was given by hand, or a mesh, cannot be kept on fewer: then the best of all families is taken.

    Raises:
        DoesNotFitError: no plan fits. PlanError: replicas have weights of their own, which fewer cannot take over.
    """
    cluster = asked.problem.cluster
    if [device.index for device in cluster.devices] == list(devices):
        return asked
    if asked.plan.synchronisation.mixes:
        raise PlanError(
            f"the plan ({asked.plan.summary()}) has replicas with weights of their own, and {len(devices)} devices are left: "
            "fewer replicas cannot continue with them; continue with --resume on as many devices"
        )
    config = asked.question.changed(cluster=asked.question.cluster.model_copy(update={"devices": tuple(devices)}))
    try:
        return _planned(asked, config)
    except ParsimError:
        return _planned(asked, config.changed(plan=PlanSection()))


def _planned(asked: Prediction, config: Question) -> Prediction:
    """The best plan for a config on fewer devices. Raises ParsimError where there is none."""
    cluster = cluster_of(config.cluster, asked.problem.cluster.profile)
    problem = problem_of(config, model=asked.problem.model, cluster=cluster)
    answer = whole(answer_of(config, replace(problem, loading=asked.problem.loading)))
    if not answer.fits:
        raise DoesNotFitError(answer.sentence())
    check_runnable(answer.prediction, None)
    return with_every_rank(answer.prediction)
