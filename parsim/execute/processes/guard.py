"""`python -m parsim.execute.processes.guard SECONDS JOB.json`: start one rank for torchrun or srun, and end it if it hangs.

Watches its rank as `launch` watches all of its own. A rank that is stopped, or does nothing, for longer than SECONDS is named
on stderr and killed, with whatever it has started. The rank dies with its guard, and the guard ends as its rank has ended.

Leaves out: ranks that all wait for one another, and machines that are gone. No guard sees them; the timeout of the collectives
(`Job.timeout_s`) ends both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from parsim.execute.processes.group import ProcessPlace, read_place
from parsim.execute.processes.heartbeat import BEATS_VARIABLE, RankWatch, create_beats, process_state, read_beats
from parsim.execute.processes.launch import POLL_S, rank_command, signals_as_exit
from parsim.execute.processes.output import MARK_VARIABLE, PARENT_VARIABLE, kill_launch, scratch_folder, signal_name


def guarded(job: Path, place: ProcessPlace, hang_s: float) -> str | int:
    """Run the rank of this place: its exit status, or what happened to it where it had none. No process of it is left."""
    mark, of = uuid.uuid4().hex, f"rank {place.rank} of {place.world_size}"
    watch = RankWatch(limit_s=hang_s, nproc=1, sees_all=False)
    with signals_as_exit(), scratch_folder() as scratch:
        beats = scratch / "beats"
        create_beats(beats, place.rank + 1)
        variables = {BEATS_VARIABLE: str(beats), PARENT_VARIABLE: str(os.getpid()), MARK_VARIABLE: mark}
        command = rank_command(["parsim.execute.worker", str(job)])
        rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | variables, start_new_session=True)
        try:
            while (status := rank.poll()) is None:
                beat = read_beats(beats, place.rank + 1)[place.rank]
                if hang := watch.look([beat], [process_state(rank.pid)], time.monotonic()):
                    with contextlib.suppress(ProcessLookupError, AttributeError):
                        rank.send_signal(signal.SIGUSR1)  # its lines on stderr say where it is, unless it is stopped
                    time.sleep(2 * POLL_S)
                    return f"{of} {hang.text}. It was ended; TIMEOUT=SECONDS before the script waits longer"
                time.sleep(POLL_S)
        finally:
            kill_launch([rank.pid], mark)
            rank.wait()
    return status if status >= 0 else f"{of} was killed by {signal_name(-status)}"


if __name__ == "__main__":
    sys.exit(guarded(Path(sys.argv[2]), read_place(), float(sys.argv[1])))
