"""What a question about a named transformer takes where it does not say: half precision, a fused Adam, components that tensor
parallelism can cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parsim.model.named.names import named
from parsim.workflow.cluster_section import ConfigSection
from parsim.workflow.config import RunConfig
from parsim.workflow.large.splits import check_splits

if TYPE_CHECKING:
    from parsim.hardware.cluster import Cluster

OPTIMIZER = "adamw_fused"
PRECISIONS = ("bf16", "amp_fp16", "amp_bf16")
"""The first that the device has a peak for."""


def with_usual(config: RunConfig, cluster: Cluster | None = None) -> RunConfig:
    """The config with these defaults, which still count as left open; the same config for any other model.

    Args:
        config: of a question. cluster: where it was given as a value.

    Raises:
        ProfileError: the cluster that the config names cannot be read.
        ConfigError: an axis of plan.mesh does not divide the model.
    """
    row = named(config.model.name)
    if row is None or row.shape is None:
        return config
    check_splits(config)
    training: dict[str, Any] = {"optimizer": OPTIMIZER, "precision": _precision(config, cluster)}
    table = config.plan.mesh
    cut = config.plan.strategy not in ("single", "dp") and (table is None or table.tp != 1)
    model = {"granularity": "sublayer" if cut else "block"}
    return config.model_copy(update={"training": _filled(config.training, training), "model": _filled(config.model, model)})


def _precision(config: RunConfig, cluster: Cluster | None) -> str:
    if "precision" in config.training.model_fields_set:
        return config.training.precision
    if cluster is None and config.cluster.machine == "this-machine":
        return config.training.precision
    from parsim.workflow.load import cluster_of

    peaks = (cluster or cluster_of(config)).devices[0].type.peak_flop_per_s
    return next((name for name in PRECISIONS if name in peaks), config.training.precision)


def _filled(section: Any, values: dict[str, Any]) -> ConfigSection:
    """A section with values for keys that were left out; they stay left out for whoever asks what was given."""
    given = set(section.model_fields_set)
    new = {key: value for key, value in values.items() if key not in given}
    found: ConfigSection = type(section).model_construct(_fields_set=given, **{**dict(section), **new})
    return found
