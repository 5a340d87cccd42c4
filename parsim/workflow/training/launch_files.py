"""Files that start a training outside parsim's launcher: a script for torchrun, one for Slurm.

Both start the same ranks as `parsim run`. They meet in a store that rank 0 binds to the address of the interface that is asked
for, under a token of the file (`parsim.execute.processes.rendezvous`). The communication goes over that interface too. All
machines must see the run folder under the same path. A training that was ended goes on from its latest checkpoint. torchrun's
agents meet in a store of the same kind, on the port behind that of the ranks (`torchrun_agent`). On one machine the agent
restarts the ranks. Those of several machines do not agree on an attempt, so they restart none.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.app.ask import ask_again, check_runnable, device_kind, run_spec, with_every_rank
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RunFolder
from parsim.app.training_checks import check_training, total_steps
from parsim.errors import ConfigError, PlanError, near_matches
from parsim.execute.cuda.faults import visible_devices
from parsim.execute.job import Job
from parsim.execute.processes.torchrun_agent import BACKEND
from parsim.files import write_text_atomically

RUN = "run"
LOOPBACK = "lo"
PORT = 29500
RESTARTS = 3
"""Of the ranks of one machine, by their agent."""
_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """What a file says. Attributes: nodes, per_node: machines, and ranks on each. visible: GPUs of each; "": the first ones."""

    name: str
    job: Path
    nodes: int
    per_node: int
    interface: str
    port: int
    device: str
    visible: str
    import_folder: str
    token: str


def export_launch(
    path: Path,
    *,
    format: str,
    interface: str | None = None,
    nodes: int | None = None,
    port: int = PORT,
    checkpoint_every: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Write the file that launches the training of a run folder, and the job that its ranks read.

    Args:
        path: of a folder that `parsim simulate --out` or `parsim run` made. format: "torchrun" or "slurm".
        interface: on which the ranks meet and communicate; None: the loopback, on one machine.
        nodes: machines; None: as many as the plan's cluster has. port: of the store, on the machine of rank 0.
        checkpoint_every: steps between checkpoints; 0: at the end only. out: the file; None: in the run folder.

    Returns:
        What was written: file, format, job, nodes, ranks_per_node, interface.

    Raises:
        ConfigError: an unknown format or interface name, no run folder. PlanError: ranks that the machines do not divide, or
            several machines without an interface. Else as `parsim run` before it starts.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown{near_matches(format, FORMATS)}")
    if interface is not None and not _NAME.fullmatch(interface):
        raise ConfigError(
            f"interface = {interface!r} is not the name of a network interface, such as eth0; `ip link` lists them"
        )
    if not 1024 <= port <= 65534:
        raise ConfigError(f"port = {port}: give one from 1024 to 65534")
    folder = RunFolder(path)
    asked = with_every_rank(ask_again(folder))
    check_runnable(asked, None)
    check_training(asked.question, asked.problem.model)
    machines = _machines(asked, nodes)
    if interface is None and machines > 1:
        raise PlanError(f"{machines} machines need the interface over which they reach one another: --interface eth0")
    launch = LaunchFile(
        name=asked.problem.model.name,
        job=folder.job.resolve(),
        nodes=machines,
        per_node=asked.plan.world_size // machines,
        interface=interface or LOOPBACK,
        port=port,
        device=device_kind(asked),
        visible=_visible(asked, asked.plan.world_size // machines),
        import_folder=str(asked.question.model.import_folder or ""),
        token=secrets.token_hex(),
    )
    steps = total_steps(asked.question)
    Job(
        output=str(path.resolve()),
        mode="train",
        runs=(run_spec(asked, RUN, folder.model),),
        steps=steps,
        warmup_steps=min(3, max(0, steps - 1)),
        device=launch.device,
        checkpoint_every=checkpoint_every,
        resume=True,
    ).save(folder.job)
    name, text = FORMATS[format]
    file = path / name if out is None else out
    _write_private(file, text(launch))
    return {
        "file": str(file),
        "format": format,
        "job": str(folder.job),
        "nodes": machines,
        "ranks_per_node": launch.per_node,
        "interface": launch.interface,
    }


def _machines(asked: Prediction, nodes: int | None) -> int:
    """How many. Raises PlanError where the ranks do not divide by it, or lie otherwise on the cluster's nodes."""
    ranks = asked.plan.world_size
    by_node = Counter(device.node for device in asked.problem.cluster.devices[:ranks])
    count = len(by_node) if nodes is None else nodes
    if count < 1 or ranks % count:
        raise PlanError(f"{ranks} ranks cannot be divided evenly over {count} machines; give --nodes a divisor of {ranks}")
    if len(by_node) > 1 and (count != len(by_node) or len(set(by_node.values())) > 1):
        raise PlanError(
            f"the plan puts its ranks on {len(by_node)} machines, {dict(by_node)} by machine, and a launch file starts as many "
            f"on each; plan for all devices, or drop --nodes {count}"
        )
    return count


def _visible(asked: Prediction, per_node: int) -> str:
    """CUDA_VISIBLE_DEVICES of a machine, where the plan does not use its first GPUs."""
    if device_kind(asked) != "cuda":
        return ""
    return visible_devices([device.index for device in asked.problem.cluster.devices[:per_node]])


def _environment(launch: LaunchFile) -> list[str]:
    """What every rank needs, after MASTER_ADDR is known."""
    lines = [
        "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 PYTHONHASHSEED=0",
        f'export GLOO_SOCKET_IFNAME={launch.interface} NCCL_SOCKET_IFNAME="={launch.interface}"',  # =: no other that begins so
        f'export PARSIM_RENDEZVOUS="$MASTER_ADDR:{launch.port}"',
        f"export PARSIM_TOKEN={launch.token}",
    ]
    if launch.import_folder:
        lines.append(f'export PYTHONPATH={shlex.quote(launch.import_folder)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return lines


def _address_of(interface: str) -> str:
    """A shell command that prints the address of an interface of the machine it runs on."""
    return f'ip -4 -o addr show dev {interface} | awk \'{{sub("/.*", "", $4); print $4; exit}}\''


def torchrun_text(launch: LaunchFile) -> str:
    """The script for torchrun; it is run on every machine."""
    lines = [
        "#!/usr/bin/env bash",
        f"# Trains {shlex.quote(launch.name)} with torchrun: {launch.nodes} machines, {launch.per_node} ranks on each.",
        "# The file holds the token of the run: whoever can read it can join. Keep its mode of 0700.",
        f"# Ranks and agents meet on ports {launch.port} and {launch.port + 1} of the first machine, on no other interface.",
    ]
    if launch.nodes > 1:
        lines += [
            "# Run it on every machine, NODE_RANK=0 first; give the others its address:",
            "#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash " + launch.job.with_name(FORMATS["torchrun"][0]).name,
            "# No agent restarts ranks by itself: those of several machines would not be in the same attempt. After a failure",
            "# run the file again on all machines; the training goes on from its latest checkpoint.",
        ]
    lines += ["set -euo pipefail", "", 'NODE_RANK="${NODE_RANK:-0}"', 'PYTHON="${PYTHON:-python}"']
    if launch.nodes > 1:
        lines += [
            'if [ -z "${MASTER_ADDR:-}" ]; then',
            '  [ "$NODE_RANK" = 0 ] || { echo "set MASTER_ADDR to the address of the machine with NODE_RANK=0" >&2; exit 2; }',
            f'  MASTER_ADDR="$({_address_of(launch.interface)})"',
            "fi",
        ]
    else:
        lines += [
            'MASTER_ADDR="127.0.0.1"'
            if launch.interface == LOOPBACK
            else f'MASTER_ADDR="${{MASTER_ADDR:-$({_address_of(launch.interface)})}}"'
        ]
    restarts = RESTARTS if launch.nodes == 1 else 0
    if launch.visible:  # Slurm chooses the GPUs of its jobs itself
        lines.append(f"export CUDA_VISIBLE_DEVICES={launch.visible}")
    lines += [
        *_environment(launch),
        'exec "$PYTHON" -m parsim.execute.processes.torchrun_agent \\',
        f'  --nnodes {launch.nodes} --nproc-per-node {launch.per_node} --max-restarts "${{MAX_RESTARTS:-{restarts}}}" \\',
        f'  --rdzv-backend {BACKEND} --rdzv-endpoint "$MASTER_ADDR:{launch.port + 1}" --rdzv-conf "rank=$NODE_RANK" \\',
        f"  -m parsim.execute.worker {shlex.quote(str(launch.job))}",
    ]
    return "\n".join(lines) + "\n"


def slurm_text(launch: LaunchFile) -> str:
    """The script for sbatch. Slurm starts the ranks itself."""
    folder = launch.job.parent
    gpus = [f"#SBATCH --gpus-per-node={launch.per_node}"] if launch.device == "cuda" else []
    own_address = _address_of(launch.interface)
    rank = (
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
        f'LOCAL_WORLD_SIZE={launch.per_node}; exec "$PYTHON" -m parsim.execute.worker "$JOB"'
    )
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', launch.name)[:64]}",
        f"#SBATCH --nodes={launch.nodes}",
        f"#SBATCH --ntasks-per-node={launch.per_node}",
        "#SBATCH --distribution=block:block",
        *gpus,
        f"#SBATCH --output={str(folder).replace(' ', '_')}/slurm-%j.log",
        "# The file holds the token of the run: whoever can read it can join. Keep its mode of 0700.",
        "set -euo pipefail",
        "",
        'export PYTHON="${PYTHON:-python}"',
        f"export JOB={shlex.quote(str(launch.job))}",
        'FIRST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'MASTER_ADDR="$(srun --nodes=1 --ntasks=1 --nodelist="$FIRST" bash -c {shlex.quote(own_address)})"',
        *_environment(launch),
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(rank)}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, tuple[str, Callable[[LaunchFile], str]]] = {
    "torchrun": ("launch-torchrun.sh", torchrun_text),
    "slurm": ("launch.sbatch", slurm_text),
}
"""Names of files, and what makes their text."""


def _write_private(path: Path, text: str) -> None:
    """Readable and executable by this user alone, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(0o077)
    try:
        write_text_atomically(path, text)
        path.chmod(0o700)
    finally:
        os.umask(before)
