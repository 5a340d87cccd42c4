"""plotly, with one message where it is not installed."""

from __future__ import annotations

from parsim.errors import require

require("plotly", "a page with figures")

import plotly.graph_objects as go  # noqa: E402
from plotly.subplots import make_subplots  # noqa: E402

__all__ = ["go", "make_subplots"]
