"""[cluster] of a run file: a profile or GPUs by name, how many nodes, and what joins them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from parsim.errors import ConfigError
from parsim.hardware.network import CardCount
from parsim.hardware.record import Count

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1)]


class ConfigSection(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


HostAmount = Annotated[float, Field(gt=0, le=1e16, allow_inf_nan=False)]

MOST_NODES = 2**16
"""Of a cluster: four times the largest that is known to train one model; a million nodes are a slip of the pen."""


class NodeGroupSection(ConfigSection):
    """[[cluster.group]]: nodes with GPUs of one kind, beside nodes with others."""

    gpu: Name
    """A shipped GPU by name, or the path of one."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] = 1
    gpus_per_node: Count | None = None
    """Left out: as many as the usual machine has; the same in all groups."""


class ClusterSection(ConfigSection):
    """[cluster]: the devices that train."""

    profile: Name | None = None
    """A shipped hardware profile by name, or the path of one; or `gpu`, which needs none."""
    gpu: Name | None = None
    """A shipped GPU by name ("h100-sxm"), or the path of one: a machine made of parts."""
    group: tuple[NodeGroupSection, ...] | None = None
    """Instead of `gpu`: nodes with different GPUs; `nodes` is then their sum."""
    gpus_per_node: Count | None = None
    """With `gpu`: of each node; left out: as many as the usual machine has."""
    link: Name | None = None
    """With `gpu`: what joins the GPUs of a node, by name or path; left out: what the usual machine has."""
    cards_per_node: CardCount | None = None
    """Network cards of each node; left out: as the network says, usually one for each slot of the machine."""
    history: Name | None = None
    """Path of the profile's validations; left out: beside a profile that is a file, none for a shipped one."""
    devices: Count | tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None = None
    """The first N devices of every node, or a list of device numbers, which count through the nodes; left out: all."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] = 1
    """So many machines of the profile, joined by `network`."""
    network: Name | None = None
    """A shipped network by name, or the path of one; needed for nodes > 1, and without meaning for one node."""
    host_link_bytes_per_s: HostAmount | None = None
    """Between one device and its host, in one direction, for plans that offload; left out: by the links of the machine."""
    host_memory_bytes: HostAmount | None = None
    """Memory of a node's host, which offloaded state and activations must fit; left out: not checked."""
    host_memory_bandwidth_bytes_per_s: HostAmount | None = None
    """Of a node's host, all sockets together: what an update on the host is bound by."""
    usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Price of one device; left out: the dated price of the part that it is."""
    busy_power_w: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Power of one device while it trains; left out: that of the part that it is, where it is known."""
    device_mtbf_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Mean hours between failures that stop the job, per device; left out: a published figure for H100."""
    checkpoint_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """The training stands so long while a checkpoint is written."""
    restart_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 600.0
    """From a failure until the last checkpoint is back."""

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_groups(cls, document: Any) -> Any:
        groups = document.get("group") if isinstance(document, dict) else None
        if not isinstance(groups, (list, tuple)) or not groups:
            return document
        counts = [entry.get("nodes", 1) if isinstance(entry, dict) else getattr(entry, "nodes", 1) for entry in groups]
        if not all(isinstance(count, int) and 1 <= count <= MOST_NODES for count in counts):
            return document
        if document.get("nodes", sum(counts)) != sum(counts):
            rule = f"the groups have {sum(counts)} nodes, and nodes = {document['nodes']}; drop nodes"
            raise PydanticCustomError("described", "{rule}", {"rule": rule})
        return {**document, "nodes": sum(counts)}

    @property
    def machine(self) -> str:
        """The profile, or the node of `gpu` as a shorthand: what `parsim.hardware.profile.load_profile` takes. Of groups their
        names."""
        if self.profile is not None:
            return self.profile
        if self.group is not None:
            return " + ".join(f"{group.nodes} nodes of {group.gpu}" for group in self.group)
        from parsim.hardware.parts.load import load_gpu
        from parsim.hardware.parts.shorthand import Machines

        gpu = str(self.gpu)
        return Machines(gpu, self.gpus_per_node or load_gpu(gpu).gpus_per_node, self.nodes, self.link).node

    @property
    def in_words(self) -> str:
        """`4 x 8xh100-sxm`: the machine, and how many of it."""
        return self.machine if self.nodes == 1 or self.group is not None else f"{self.nodes} x {self.machine}"


OPERATION = frozenset({"usd_per_hour", "busy_power_w", "device_mtbf_hours", "checkpoint_s", "restart_s"})
"""Keys that change no plan, and may stand beside a cluster that was given as a value."""


def check_machine(cluster: ClusterSection) -> None:
    """Exactly one of profile, gpu and groups, and the keys that belong to parts."""
    if cluster.group is not None:
        beside = [key for key in ("profile", "gpu", "gpus_per_node") if getattr(cluster, key) is not None]
        if beside or not cluster.group:
            what = f"has cluster.{beside[0]} beside it; drop one of them" if beside else "is empty; name a GPU in each group"
            raise ConfigError(f"[[cluster.group]] {what}")
        return
    if (cluster.profile is None) == (cluster.gpu is None):
        given = "neither is given" if cluster.profile is None else f"profile = {cluster.profile!r} and gpu = {cluster.gpu!r}"
        raise ConfigError(
            f'[cluster] needs exactly one of profile and gpu, and {given}: profile = "dgx1-v100-32gb" names a machine, '
            'gpu = "h100-sxm" makes one of parts'
        )
    for key in ("gpus_per_node", "link"):
        if cluster.gpu is None and (value := getattr(cluster, key)) is not None:
            raise ConfigError(f"cluster.{key} = {value!r} belongs to cluster.gpu, and a profile says it itself; drop {key}")
    if cluster.cards_per_node is not None and cluster.network is None:
        raise ConfigError(f"cluster.cards_per_node = {cluster.cards_per_node} needs cluster.network; add it, or drop the cards")
