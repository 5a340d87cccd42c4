"""One priced piece of work: its median, where the number comes from, and which uncertain parameters it rests on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from parsim.units import format_seconds

Source = Literal["measured", "fitted", "published", "updated"]
"""`updated`: one of the others, times what a validation has shown it to be wrong by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Attributes:
    median_s: seconds.
    parameters: (name, relative standard deviation) of the uncertain parameters the number is proportional to. Work
        that names the same parameter shares its draw: independent draws per task would average out to nothing.
    repeat_sigma: relative spread of one repetition around the median (noise of a single task on a single rank).
    detail: for people: "measured: 30 repeats at 16 samples", "ring over 0,1,2,3".
    extrapolated: the question lies outside the measured range.
    issue_s: on a GPU, seconds of the host to queue the work (0: not measured apart).
    host_bound: `median_s` is `issue_s` and not the device's time, which is shorter.
    """

    median_s: float
    source: Source
    parameters: tuple[tuple[str, float], ...] = ()
    repeat_sigma: float = 0.0
    detail: str = ""
    extrapolated: bool = False
    issue_s: float = 0.0
    host_bound: bool = False

    def issued(self) -> Estimate:
        """No shorter than the host takes to queue it: the device waits for the rest of its kernels.

        Of a row of tasks this is at most too long: a host that is ahead after a long task queues the next one meanwhile, which
        is left out. It is never too short: whatever the order of tasks, they take as long as the host, and as long as the
        device.
        """
        if self.issue_s <= self.median_s:
            return self
        detail = f"{self.detail}; the host takes longer to queue it than the device to run it ({format_seconds(self.median_s)})"
        return replace(self, median_s=self.issue_s, host_bound=True, detail=detail)

    def longer_by(self, seconds: float) -> Estimate:
        """The same with so many seconds more."""
        return replace(self, median_s=self.median_s + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFactors:
    """While computation and communication of one rank run at once, each takes its factor times as long as alone.

    Attributes:
        core_of_rank: the processor core each rank runs on; empty: a core each. Ranks on one core share it: k of them that
            compute at once take k times as long each, and what one communicates slows what another computes.
        communications_share: what a rank communicates at once on several streams takes turns at its core: k operations take k
            times as long each, as those of a library that works on the processor do.
        loads_ahead: a step's batch is loaded while the step before still runs, as the copy engine of a GPU does it; where
            loading is the work of the core that computes, it waits for its turn.
    """

    compute: float = 1.0
    communication: float = 1.0
    core_of_rank: tuple[int, ...] = ()
    communications_share: bool = False
    loads_ahead: bool = True
