"""The measured peak of live tensors, in the lines in which `costs/memory/rank_memory` predicts it.

The lines are those alive at the end of that forward at which most is alive: what a step keeps, before a backward lets go of
it. `workspace` is by how much the fullest moment of the step exceeds that, whenever it comes. So both sides add up to a peak,
and mean the same by a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from parsim.execute.stage import StageReplica
from parsim.graph.task import Task
from parsim.model.memory.live_memory import LiveBytes
from parsim.work import Compute, Phase

MOVING = ("inputs", "receive_buffers")
"""Lines of tensors that wait to be read: read by a forward, they are among its activations."""

PASSING = ("workspace", "unsharded")
"""Lines that are predicted for the fullest moment, not for the end of a forward; here both are called workspace."""


class StepWatch:
    """Receives the events of a step of `RankProgram`, to count memory. This one takes no notice."""

    def begins(self, task: Task) -> None:
        """A computation or the loading of the batch begins in this thread."""

    def ends(self, task: Task) -> None:
        """It has ended."""

    def loading(self) -> None:
        """The next step's batch begins to be loaded, beside this step."""

    def loaded(self, tensor: Tensor) -> None:
        """A value of the batch is there."""

    def receiving(self) -> None:
        """Room for what other ranks send begins to be made, in this thread."""

    def received(self, tensor: Tensor) -> None:
        """A buffer for what another rank sends is there, what a conversion has made, or a copy that is sent."""

    def resized(self, tensor: Tensor) -> None:
        """The parameters of a bucket are whole here, or no longer (ZeRO 3)."""


class LineWatch(StepWatch):
    """Attributes: live: counts while it is open. lines: bytes per line at the fullest end of a forward so far."""

    def __init__(self) -> None:
        self.live = LiveBytes(moving=MOVING)
        self.lines: dict[str, int] = {}

    def begins(self, task: Task) -> None:
        self.live.line = "activations" if _is_forward(task) else "workspace"

    def ends(self, task: Task) -> None:
        if _is_forward(task) and self.live.current_bytes > sum(self.lines.values()):
            self.lines = self.live.by_line()

    def loading(self) -> None:
        self.live.line = "inputs"

    def loaded(self, tensor: Tensor) -> None:
        self.live.track(tensor, "inputs")

    def receiving(self) -> None:
        self.live.line = "receive_buffers"

    def received(self, tensor: Tensor) -> None:
        self.live.track(tensor, "receive_buffers")

    def resized(self, tensor: Tensor) -> None:
        self.live.track(tensor, "unsharded")

    def peak_lines(self) -> dict[str, int]:
        """Bytes per line; they add up to the peak."""
        kept = {line: size for line, size in self.lines.items() if line not in PASSING}
        return {**kept, "workspace": self.live.peak_bytes - sum(kept.values())}


@contextmanager
def watching(stage: StageReplica) -> Iterator[LineWatch]:
    """A watch that counts, with what is alive on a CPU rank between steps."""
    watch = LineWatch()
    with watch.live:
        for line, tensors in stage.resident_tensors().items():
            for tensor in tensors:
                watch.live.track(tensor, line)
        yield watch


def _is_forward(task: Task) -> bool:
    return isinstance(task.work, Compute) and task.work.phase is Phase.FORWARD
