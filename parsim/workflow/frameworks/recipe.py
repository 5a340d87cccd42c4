"""What a framework's file says of a training, in parsim's words, and what parsim makes of every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parsim.errors import ConfigError, near_matches
from parsim.model.catalogue.names import named
from parsim.units import nearest_divisors

LAYERS = "h.*"
CORE = "h.*.core"
GENERIC = "transformer"
"""The named model whose sizes a file gives one by one."""


@dataclass(kw_only=True)
class Recipe:
    """A file, read.

    Attributes:
        framework: whose file it is. model: a name of the table; args: its arguments. training: keys of [training].
        tp, pp, cp, ep: of the mesh. dp: replicas; 0: as many as the devices make.
        replicate: how often divided states are kept (HSDP). micro_batch: samples of a replica at once.
        local_batch: samples of a replica per step where the file gives no global batch; 0: one microbatch.
        zero: stage. recompute: "none", "full", "alternate" (each `every`th layer) or "selective" (by operator).
        chunks: stages per rank. order: of the pipeline; "": 1f1b, or interleaved with several stages per rank.
        optimizer_offload: the optimizer's state lies in the host's memory. offloaded_layers: so do activations of these first.
        processes: that the file starts; 0: it does not say.
        taken: keys that entered, with their values. left_out: keys that change time or memory and that parsim does not model,
        with what it does instead. ignored: keys that change neither. unknown: keys that parsim does not know.
    """

    framework: str
    model: str = GENERIC
    args: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    dp: int = 0
    cp: int = 1
    ep: int = 1
    replicate: int = 1
    micro_batch: int = 1
    local_batch: int = 0
    zero: int = 0
    recompute: str = "none"
    every: int = 2
    chunks: int = 1
    order: str = ""
    processes: int = 0
    optimizer_offload: bool = False
    offloaded_layers: int = 0
    taken: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def settings(self, devices: int) -> dict[str, object]:
        """Keys of a run file, for so many devices.

        Raises:
            ConfigError: the devices do not divide by the mesh, or the batch not by replicas and microbatches.
        """
        shard = self.tp * self.pp * self.cp
        if devices % shard:
            raise ConfigError(
                f"{self.framework}: tp {self.tp} x pp {self.pp} x cp {self.cp} = {shard} must divide the devices ({devices}); "
                f"ask for {f'{devices // shard * shard} or ' if devices > shard else ''}{(devices // shard + 1) * shard}"
            )
        dp = devices // shard
        if self.dp and self.dp != dp:
            raise ConfigError(
                f"{self.framework}: the file asks for {self.dp} replicas x {shard} = {self.dp * shard} devices, and the "
                f"cluster has {devices}; ask for {self.dp * shard}"
            )
        mesh: dict[str, int] = {"pp": self.pp, "dp": dp, "tp": self.tp}
        mesh |= {axis: size for axis, size in (("cp", self.cp), ("ep", self.ep)) if size > 1}
        microbatches = self._microbatches(dp)
        found: dict[str, object] = {f"training.{key}": value for key, value in self.training.items()}
        found |= {"model.args": dict(self.args), "plan.mesh": mesh, **self._states(dp)}
        found["plan.microbatches"] = microbatches
        uncut = self.tp == 1 and self.pp == 1
        found["plan.recompute"] = self._recomputed(whole=uncut)
        if self.optimizer_offload:
            found["plan.optimizer_offload"] = True
        if self.offloaded_layers:
            each = "" if uncut else ".*"
            found["plan.activation_offload"] = [f"h.{layer}{each}" for layer in range(self.offloaded_layers)]
        if self.pp > 1:
            found["plan.pipeline_order"] = self.order or ("interleaved" if self.chunks > 1 else "1f1b")
            found["plan.chunks"] = self.chunks
        found["plan.strategy"] = "single" if devices == 1 else "dp" if uncut else "hp" if dp > 1 else "mp"
        return found

    def _states(self, dp: int) -> dict[str, object]:
        """The ZeRO stage, and over how many replicas it divides: left out, the search would try those of a node as well."""
        if not self.zero or (dp == 1 and self.replicate == 1):
            return {"plan.zero_stage": self.zero}
        if dp % self.replicate:
            raise ConfigError(
                f"{self.framework}: the file keeps states {self.replicate} times, which must divide the {dp} replicas; the "
                f"nearest that do: {nearest_divisors(dp, self.replicate)}"
            )
        size = dp // self.replicate
        return {"plan.zero_stage": self.zero, "plan.dp_shard": size} if size * self.cp > 1 else {"plan.zero_stage": 0}

    def _recomputed(self, *, whole: bool) -> str | list[str]:
        """Patterns of components; `whole`: a layer is one component."""
        if self.recompute == "alternate":
            row = named(self.model)
            layers = self.args.get("layers") or (row.shape.layers if row is not None and row.shape is not None else 0)
            return [f"h.{layer}" if whole else f"h.{layer}.*" for layer in range(self.every - 1, layers, self.every)]
        patterns: dict[str, str | list[str]] = {"none": "none", "full": [LAYERS], "selective": "selective"}
        return patterns[self.recompute]

    def _microbatches(self, dp: int) -> int:
        batch = self.training.setdefault("global_batch", dp * (self.local_batch or self.micro_batch))
        parts = dp * self.micro_batch
        if batch % parts:
            raise ConfigError(
                f"{self.framework}: the global batch ({batch}) must be divisible by {dp} replicas x micro-batch "
                f"{self.micro_batch} = {parts}; the nearest that is: {max(1, round(batch / parts)) * parts}"
            )
        return int(batch) // parts

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, under `config_file`."""
        return {
            "framework": self.framework,
            "taken": self.taken,
            "left_out": self.left_out,
            "ignored": sorted(self.ignored),
            "unknown": sorted(self.unknown),
        }

    def lines(self) -> list[str]:
        """What was made of the file, for people."""
        found = [
            f"read as {self.framework}: {len(self.taken)} keys taken, {len(self.ignored)} that change neither time nor memory"
        ]
        found += [f"  {key}: matters and is left out: {why}" for key, why in self.left_out.items()]
        if self.unknown:
            found.append(f"  unknown, may matter: {', '.join(sorted(self.unknown))}")
        return found


def whole_number(framework: str, key: str, value: object) -> int:
    """A count of a file. Raises ConfigError."""
    try:
        number = float(str(value).replace("_", ""))
    except ValueError as error:
        raise ConfigError(f"{framework}: {key} = {value!r} must be a whole number") from error
    if number != int(number) or number < 0:
        raise ConfigError(f"{framework}: {key} = {value!r} must be a whole number >= 0")
    return int(number)


def needed(framework: str, found: Mapping[str, Any], key: str) -> Any:
    """A key that a file must have. Raises ConfigError."""
    if key not in found:
        raise ConfigError(f"{framework}: {key} is missing{near_matches(key, found) if found else ''}; add it")
    return found[key]
