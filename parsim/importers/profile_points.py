"""Measured collectives into a profile: points, the fits to them, and how far the profile was from them before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from parsim.costs.communication.closed_forms import fitted_s
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.measured import fits_of_points
from parsim.errors import CostError, ImportedFileError, ProfileError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Profile, SourceEntry
from parsim.importers.nccl_tests import NcclLog, NcclTest
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv

PREFIX = "nccl-tests-"
FIT = "fit-nccl-tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedGroup:
    """What one operation over one group brought.

    Attributes:
        points: timings. sizes: distinct. fit_error: median of |fit - measured| / measured.
        error_before: of the profile as it was (None: it had no price). errors are signed medians with `bias_before`.
    """

    operation: str
    group: tuple[int, ...]
    points: int
    min_size_bytes: int
    max_size_bytes: int
    ranges: int
    fit_error: float
    error_before: float | None
    bias_before: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "group": list(self.group),
            "points": self.points,
            "min_size_bytes": self.min_size_bytes,
            "max_size_bytes": self.max_size_bytes,
            "ranges": self.ranges,
            "fit_error": self.fit_error,
            "error_before": self.error_before,
            "bias_before": self.bias_before,
        }


def with_measured(profile: Profile, log: NcclLog, digest: str, where: str) -> tuple[Profile, tuple[FittedGroup, ...]]:
    """The profile with a log's points and the fits to them.

    Points of a file that was imported before are replaced; those of other files stay, and one fit covers them all.

    Args:
        profile: of the machine that was measured. log: of `read_nccl_tests`.
        digest: names the file's content. where: name of the file, without its folder.

    Raises:
        ImportedFileError: the profile is not of NCCL, lacks a device, or there are fewer than two sizes.
    """
    communication = profile.communication
    if communication.backend != "nccl":
        raise ImportedFileError(
            f"profile {profile.name} has communication.backend = {communication.backend!r}, and nccl-tests measures NCCL; "
            "import into the profile of the GPUs"
        )
    known = {entry.index for entry in profile.devices}
    for test in log.tests:
        if lost := sorted(set(test.group) - known):
            raise ImportedFileError(
                f"the file was measured on devices {list(test.group)}, and profile {profile.name} has no device {lost[0]}; "
                "take a profile of that machine, or map them to devices: --ranks 0,1,2,3"
            )
    key = PREFIX + digest
    new = [point for test in log.tests for point in _points(test, key)]
    kept = [point for point in communication.points if point.source != key]
    points = [*kept, *new]
    imported = [point for point in points if point.source.startswith(PREFIX)]
    by_group = communication.link_model is not None
    try:
        fits = fits_of_points(imported, by_group=by_group, source=FIT)
    except ProfileError as error:
        raise ImportedFileError(f"{where}: {error} (-b and -e of nccl-tests)") from error
    replaced = {(fit.operation, fit.group_size, _sorted(fit)) for fit in fits}
    others = [fit for fit in communication.fits if (fit.operation, fit.group_size, _sorted(fit)) not in replaced]
    gpus = ", ".join(dict.fromkeys(name for test in log.tests for name in test.devices)) or "devices not named"
    sources = dict(profile.sources) | {
        key: SourceEntry(kind="measurement", text=f"nccl-tests, file {where}, {gpus}"),
        FIT: SourceEntry(kind="derived", text="piecewise lines fitted to all imported points of nccl-tests"),
    }
    update = {"points": points, "fits": [*others, *fits]}
    made = profile.model_copy(
        update={"communication": communication.model_copy(update=update), "sources": {name: sources[name] for name in sources}}
    )
    return made, tuple(_compared(profile, test, fits, by_group) for test in _merged(log.tests))


def _points(test: NcclTest, source: str) -> list[CollectivePoint]:
    return [
        CollectivePoint(
            operation=test.operation,
            group=list(test.group),
            size_bytes=row.size_bytes,
            seconds=float(f"{row.seconds:.6g}"),
            spread=row.spread,
            repeats=test.repeats,
            source=source,
        )
        for row in test.rows
    ]


def _sorted(fit: CollectiveFit) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in fit.groups))


def _merged(tests: Sequence[NcclTest]) -> list[NcclTest]:
    """Tests of one operation and group as one."""
    found: dict[tuple[str, tuple[int, ...]], NcclTest] = {}
    for test in tests:
        key = (test.operation, test.group)
        rows = (*found[key].rows, *test.rows) if key in found else test.rows
        found[key] = NcclTest(operation=test.operation, group=test.group, devices=test.devices, rows=rows, repeats=test.repeats)
    return list(found.values())


def _compared(profile: Profile, test: NcclTest, fits: Sequence[CollectiveFit], by_group: bool) -> FittedGroup:
    fit = next(
        fit
        for fit in fits
        if fit.operation == test.operation
        and fit.group_size == len(test.group)
        and (not by_group or fit.groups == [list(test.group)])
    )
    errors = [abs(fitted_s(fit, row.size_bytes) / row.seconds - 1) for row in test.rows]
    before = _errors_before(profile, test)
    sizes = [row.size_bytes for row in test.rows]
    return FittedGroup(
        operation=test.operation,
        group=test.group,
        points=len(test.rows),
        min_size_bytes=min(sizes),
        max_size_bytes=max(sizes),
        ranges=len(fit.regimes),
        fit_error=median(errors),
        error_before=median(abs(error) for error in before) if before else None,
        bias_before=median(before) if before else None,
    )


def _errors_before(profile: Profile, test: NcclTest) -> list[float]:
    """(price - measured) / measured of the profile as it was; none where it has no price."""
    try:
        cluster = cluster_from_profile(profile)
        ranks = tuple(place for place, device in enumerate(cluster.devices) if device.index in test.group)
        return [_price(cluster, test.operation, ranks, row.size_bytes) / row.seconds - 1 for row in test.rows]
    except (CostError, ProfileError):
        return []


def _price(cluster: Cluster, operation: str, ranks: tuple[int, ...], size_bytes: int) -> float:
    if operation in COLLECTIVE_KINDS:
        return estimate_collective(Collective(operation=operation, group=ranks, size_bytes=size_bytes), cluster).median_s
    transfer = SendRecv(source=ranks[0], destination=ranks[1], size_bytes=size_bytes)
    return estimate_send_recv(transfer, cluster).median_s
