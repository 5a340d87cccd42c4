"""parsim: which way of training this model on this cluster is fastest, how long it takes, whether it fits, how sure we are.

Model -> Plan -> TaskGraph -> Timeline, and the same graph is run for real. Start reading at `parsim.schedule.search`.
"""

from __future__ import annotations

from parsim.moved import announce_moves

__all__ = ["__version__"]

__version__ = "0.1.0"

announce_moves()
