"""`parsim export`: what every format keeps of a plan, says that it leaves out, and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsim.errors import ConfigError
from parsim.workflow.exporting.formats import FORMATS, export_folder


def test_an_unknown_format_is_refused_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format 'safetensor' is unknown; did you mean safetensors\?"):
        export_folder(tmp_path, format="safetensor")


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_without_a_run_is_refused(tmp_path: Path, format: str) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        export_folder(tmp_path, format=format)
