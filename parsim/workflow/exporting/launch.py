"""Files that launch the training: `torchrun` and `slurm`."""

from __future__ import annotations

from pathlib import Path

from parsim.workflow.exporting.request import Exported, ExportRequest
from parsim.workflow.training.launch_files import export_launch


def write_launch(request: ExportRequest) -> Exported:
    """The script and the job that its ranks read. Raises as `export_launch`."""
    done = export_launch(request.folder.path, format=request.format, out=request.out, **request.options)
    return Exported(
        format=request.format,
        file=Path(done["file"]),
        summary=f"{done['nodes']} x {done['ranks_per_node']} ranks over {done['interface']}: {done['file']}",
        found={key: done[key] for key in ("job", "nodes", "ranks_per_node", "interface")},
    )
