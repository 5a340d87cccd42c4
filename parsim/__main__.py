"""`python -m parsim`, and the `parsim` script."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType
from typing import NoReturn


def _end(number: int, frame: FrameType | None) -> NoReturn:
    text = f"parsim: ended by {signal.Signals(number).name} before the command had begun. Give it again\n"
    os.write(2, text.encode())
    os._exit(128 + number)


def main() -> None:
    """Load the commands, which takes a second, and run one. A signal meanwhile ends in a line."""
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _end) for number in ends if signal.getsignal(number) != signal.SIG_IGN}
    gc.disable()  # there is no garbage among modules
    from parsim.cli import main as command

    gc.enable()
    for number, handler in before.items():
        signal.signal(number, handler)
    command()


if __name__ == "__main__":
    main()
