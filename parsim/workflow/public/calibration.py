"""A Calibration: the profile of this machine, and its path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parsim.hardware.profile import Profile

if TYPE_CHECKING:
    import pandas as pd

    from parsim.report.tables import ReportTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """The result of `parsim.calibrate`; pass it to `parsim.plan` as the cluster.

    Attributes:
        path: of the profile; the raw points lie in the same folder.
    """

    path: Path
    profile: Profile

    @property
    def warnings(self) -> tuple[str, ...]:
        """Timings that were discarded, and doubts about the rest."""
        return tuple(self.profile.provenance.warnings)

    def table(self) -> pd.DataFrame:
        """The measurements as strings; columns as in the table that `parsim calibrate` prints."""
        import pandas as pd

        report = self.report()
        return pd.DataFrame(list(report.rows), columns=[column.name for column in report.columns])

    def report(self) -> ReportTable:
        from parsim.report.profile_table import calibration_table

        return calibration_table(self.profile)

    def __str__(self) -> str:
        from parsim.report.tables import to_text

        return f"{to_text(self.report())}\nProfile: {self.path}"

    def __repr__(self) -> str:
        compute = self.profile.compute
        return (
            f"Calibration({self.path}: {len(self.profile.devices)} devices, {len(compute.components)} component points, "
            f"{len(self.profile.communication.points)} collective points, {len(self.warnings)} warnings)"
        )

    def _repr_html_(self) -> str:
        from parsim.report.notebook import table_html

        return table_html(self.report())
