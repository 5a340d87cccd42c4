"""torchrun, with its verdict as data: `python -m parsim.execute.processes.torchrun_agent FAILURES.json <arguments of
torchrun>`.

Runs `torch.distributed.run` in this process unchanged. If ranks fail, FAILURES.json says which, in the order torchrun
noticed, with exit status and process number, so that nobody has to read it out of a log. This process dies with the one that
launched it, and every rank with this one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from parsim.execute.processes.processes import PARENT_VARIABLE, die_with_parent


def main(arguments: list[str]) -> int:
    """Exit status: 0 all ranks succeeded, 1 some failed, 2 torchrun itself did."""
    failures_path, torchrun_arguments = Path(arguments[0]), arguments[1:]
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(torchrun_arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_status": failure.exitcode, "pid": failure.pid, "time_s": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        failures_path.write_text(json.dumps({"failures": failures}))
        return 1
    except Exception as error:
        failures_path.write_text(json.dumps({"torchrun": f"{type(error).__name__}: {error}"}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
