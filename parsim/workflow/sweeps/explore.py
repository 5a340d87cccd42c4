"""From a sweep to its explorer page."""

from __future__ import annotations

from pathlib import Path

from parsim.errors import ConfigError
from parsim.report.explorer.columns import ExplorerData
from parsim.report.explorer.page import write_explorer_page
from parsim.workflow.sweeps.result import Sweep


def write_explorer(sweep: Sweep, path: Path) -> Path:
    """Write one page that needs no network. Returns its path.

    Args:
        sweep: of any design. path: of the page.

    Raises:
        ConfigError: the path is a folder.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the page a name, such as {path / 'explorer.html'}")
    data = ExplorerData(
        title=sweep.title,
        summary=[*sweep.heading(), *(line for line in sweep.lines() if line not in sweep.notes)],
        axes=[axis.key for axis in sweep.axes],
        rows=sweep.rows,
        picked=_picked(sweep),
        command=f"parsim plan {sweep.asked}".strip(),
        notes=list(sweep.notes),
    )
    return write_explorer_page(data, path)


def _picked(sweep: Sweep) -> int | None:
    """The number of the row that the sweep's own goal picks."""
    if not sweep.goal:
        return None
    try:
        row = sweep.best()
    except ConfigError:
        return None
    return None if row is None else int(row["point"])
