"""Machines in one word: `8xh100-sxm` is a node of eight, `8xa100-pcie-80gb@nvlink-bridge-3` names the link as well, and
`1024xh100-sxm` is as many whole nodes as it takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parsim.errors import ProfileError
from parsim.hardware.parts.load import load_gpu

FORM = re.compile(r"\s*(?P<count>\d[\d_,]*)\s*x\s*(?P<gpu>[^@\s][^@]*)(@(?P<link>.+))?")


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes of `gpus_per_node` equal GPUs; link: None for the usual one."""

    gpu: str
    gpus_per_node: int
    nodes: int
    link: str | None = None

    @property
    def node(self) -> str:
        """One of the nodes, as a shorthand."""
        return f"{self.gpus_per_node}x{self.gpu}" + (f"@{self.link}" if self.link else "")


def is_shorthand(text: str) -> bool:
    """Whether a text has the form COUNTxGPU."""
    return FORM.fullmatch(text) is not None


def machines_of(text: str, per_node: int | None = None) -> Machines:
    """What a shorthand means: nodes of the usual size, or one smaller node.

    Args:
        text: such as "1024xh100-sxm". per_node: GPUs of a node; None: the usual number.

    Raises:
        ProfileError: another form, an unknown GPU, or a number that is not a whole number of nodes.
    """
    found = FORM.fullmatch(text)
    if found is None:
        raise ProfileError(f"{text!r} names no GPUs: write COUNTxGPU, for example 8xh100-sxm")
    count, gpu, link = int(re.sub("[_,]", "", found["count"])), found["gpu"].strip(), found["link"]
    usual = per_node or load_gpu(gpu).gpus_per_node
    if count < 1:
        raise ProfileError(f"{text!r}: at least one GPU is needed")
    if per_node is not None and count % per_node:
        raise ProfileError(f"{text!r} are no whole number of nodes of cluster.gpus_per_node = {per_node}; change one of them")
    if count <= usual:
        return Machines(gpu, count, 1, link)
    if count % usual:
        whole = count // usual * usual
        raise ProfileError(
            f"{text!r}: {load_gpu(gpu).name} comes in nodes of {usual}, and {count:,} are no whole number of them; ask for "
            f"{whole:,} or {whole + usual:,}, or set cluster.gpus_per_node and cluster.nodes"
        )
    return Machines(gpu, usual, count // usual, link)
