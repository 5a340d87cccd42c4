"""Trained weights, and files that start a training outside parsim's launcher: a script for torchrun, one for Slurm.

Both scripts start the same ranks as `parsim run`, each under a guard that ends it if it hangs (`processes.launch`). They meet
in a store that rank 0 binds to the address of the interface that is asked for, under the token of the file
(`processes.rendezvous`). The communication goes over that interface too. All machines must see the run folder under the same
path. A training that was ended goes on from its latest checkpoint. torchrun's agents meet in a store of the same kind, on the
port behind that of the ranks (`rendezvous_of`). On one machine the agent restarts the ranks. Those of several machines do not
agree on an attempt, so they restart none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError, MissingDependencyError
from parsim.execute.processes.launch import HANG_S
from parsim.execute.processes.rendezvous import BACKEND
from parsim.files import write_atomically, write_text_atomically
from parsim.formats.exports import Exported
from parsim.formats.source import FileFormat

if TYPE_CHECKING:
    from torch import Tensor

LOOPBACK = "lo"
PORT = 29500
RESTARTS = 3
"""How often the agent of one machine restarts its ranks."""
TORCHRUN_FILE = "launch-torchrun.sh"


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """What a launch file says.

    Attributes:
        name: of the training. job: the file that the ranks read. nodes, per_node: machines, and ranks on each.
        interface: on which the ranks meet and communicate. port: of their store, on the machine of rank 0.
        device: "cpu" or "cuda". visible: GPUs of each machine; "": the first ones.
        import_folder: put on the import path; "": none. token: of the run.
    """

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


def _environment(launch: LaunchFile) -> list[str]:
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
        f"# Trains {json.dumps(launch.name)} with torchrun: {launch.nodes} machines, {launch.per_node} ranks on each.",
        "# The file holds the token of the run: whoever can read it can join. Keep its mode of 0700.",
        f"# Ranks and agents meet on ports {launch.port} and {launch.port + 1} of the first machine, on no other interface.",
    ]
    if launch.nodes > 1:
        lines += [
            "# Run it on every machine, NODE_RANK=0 first; give the others its address:",
            "#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash " + launch.job.with_name(TORCHRUN_FILE).name,
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
        lines.append(f"export CUDA_VISIBLE_DEVICES={shlex.quote(launch.visible)}")
    lines += [
        *_environment(launch),
        'exec "$PYTHON" -m parsim.execute.processes.rendezvous \\',
        f'  --nnodes {launch.nodes} --nproc-per-node {launch.per_node} --max-restarts "${{MAX_RESTARTS:-{restarts}}}" \\',
        f'  --rdzv-backend {BACKEND} --rdzv-endpoint "$MASTER_ADDR:{launch.port + 1}" --rdzv-conf "rank=$NODE_RANK" \\',
        f'  -m parsim.execute.processes.launch "${{TIMEOUT:-{HANG_S:g}}}" {shlex.quote(str(launch.job))}',
    ]
    return "\n".join(lines) + "\n"


def _directive_value(folder: Path) -> str:
    """A folder in a line that sbatch reads, where "%" begins a pattern and no shell quotes hold."""
    text = str(folder)
    if unfit := re.search(r"""[^\S ]|["'\\\\]""", text):
        raise ConfigError(
            f"the folder {text!r} holds {unfit[0]!r}, which a directive of Slurm cannot hold; rename the folder, or export "
            "--format torchrun"
        )
    return text.replace("%", "%%").replace(" ", "\\ ")


def slurm_text(launch: LaunchFile) -> str:
    """The script for sbatch. Slurm starts the ranks itself."""
    folder = launch.job.parent
    gpus = [f"#SBATCH --gpus-per-node={launch.per_node}"] if launch.device == "cuda" else []
    address = _address_of(launch.interface)
    rank = (
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
        f'LOCAL_WORLD_SIZE={launch.per_node}; exec "$PYTHON" -m parsim.execute.processes.launch "$TIMEOUT" "$JOB"'
    )
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', launch.name)[:64]}",
        f"#SBATCH --nodes={launch.nodes}",
        f"#SBATCH --ntasks-per-node={launch.per_node}",
        "#SBATCH --distribution=block:block",
        *gpus,
        f"#SBATCH --output={_directive_value(folder)}/slurm-%j.log",
        "# The file holds the token of the run: whoever can read it can join. Keep its mode of 0700.",
        "set -euo pipefail",
        "",
        'export PYTHON="${PYTHON:-python}"',
        f'export TIMEOUT="${{TIMEOUT:-{HANG_S:g}}}" JOB={shlex.quote(str(launch.job))}',
        'FIRST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'MASTER_ADDR="$(srun --nodes=1 --ntasks=1 --nodelist="$FIRST" bash -c {shlex.quote(address)})"',
        *_environment(launch),
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(rank)}",
    ]
    return "\n".join(lines) + "\n"


def _write_launch(launch: LaunchFile, file: Path, *, format: str) -> Exported:
    """Readable and executable by this user alone, from its first byte on."""
    text = torchrun_text(launch) if format == "torchrun" else slurm_text(launch)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(0o077)
    try:
        write_text_atomically(file, text)
        file.chmod(0o700)
    finally:
        os.umask(before)
    return Exported(
        format=format,
        file=file,
        summary=f"{launch.nodes} x {launch.per_node} ranks over {launch.interface}: {file}",
        found={
            "job": str(launch.job),
            "nodes": launch.nodes,
            "ranks_per_node": launch.per_node,
            "interface": launch.interface,
        },
    )


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """The state_dict of a trained module.

    Attributes: tensors: on the CPU, under every name that the module gives them. weights: "trained", or "ema", their moving
        averages. checkpoint: "best" or "last". step: of the training. warnings: newer checkpoints that are damaged.
    """

    tensors: Mapping[str, Tensor]
    weights: str
    checkpoint: str
    step: int
    warnings: tuple[str, ...] = ()


def _write_weights(weights: TrainedWeights, file: Path, *, format: str) -> Exported:
    """A file that loads into the original module, without parsim; `torch.load` reads it with weights_only=True."""
    import torch

    if format == "state_dict":
        write_atomically(file, lambda handle: torch.save(dict(weights.tensors), handle), force=True)
    else:
        try:
            from safetensors.torch import save
        except ImportError as error:
            raise MissingDependencyError(
                "--format safetensors needs the package safetensors: pip install 'parsim[safetensors]'; or take --format "
                "state_dict"
            ) from error
        write_atomically(file, lambda handle: handle.write(save(dict(weights.tensors), {"format": "pt"})), force=True)
    what = "Averages of the weights" if weights.weights == "ema" else "Weights"
    found: dict[str, Any] = {
        "checkpoint": weights.checkpoint,
        "weights": weights.weights,
        "step": weights.step,
        "tensors": len(weights.tensors),
        "elements": sum(tensor.numel() for tensor in weights.tensors.values()),
        "warnings": list(weights.warnings),
    }
    return Exported(
        format=format,
        file=file,
        summary=(
            f"{what} of the {weights.checkpoint} checkpoint (step {weights.step}, {len(weights.tensors)} tensors): {file}"
        ),
        found=found,
    )


_OF_WEIGHTS = ("checkpoint", "weights")
_TO_LAUNCH = ("interface", "nodes", "port", "checkpoint_every")
FORMATS = {
    "state_dict": FileFormat(
        what="trained weights, as torch.save writes them",
        writes="weights",
        write=partial(_write_weights, format="state_dict"),
        file="weights.pt",
        options=_OF_WEIGHTS,
    ),
    "safetensors": FileFormat(
        what="trained weights, as safetensors",
        writes="weights",
        write=partial(_write_weights, format="safetensors"),
        file="weights.safetensors",
        options=_OF_WEIGHTS,
    ),
    "torchrun": FileFormat(
        what="a script that launches the training with torchrun",
        writes="launch",
        write=partial(_write_launch, format="torchrun"),
        file=TORCHRUN_FILE,
        options=_TO_LAUNCH,
    ),
    "slurm": FileFormat(
        what="a batch script that launches the training with Slurm",
        writes="launch",
        write=partial(_write_launch, format="slurm"),
        file="launch.sbatch",
        options=_TO_LAUNCH,
    ),
}
