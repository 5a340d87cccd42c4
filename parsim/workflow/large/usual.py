"""What a question about a transformer takes where it does not say: half precision and a fused Adam, and a named one components
that tensor parallelism can cut.

So do models of the library transformers (a config.json, `t5-large`) on GPUs. On this machine, which was calibrated with the
precision and the optimizer of the run file, they take those of every other model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.model.named.names import named
from parsim.model.spec import is_config, takes_usual
from parsim.workflow.cluster_section import ConfigSection
from parsim.workflow.config import RunConfig
from parsim.workflow.large.splits import check_splits
from parsim.workflow.training.section import check_widths

if TYPE_CHECKING:
    from parsim.hardware.cluster import Cluster
    from parsim.hardware.device import DeviceType

OPTIMIZER = "adamw_fused"
PRECISIONS = ("bf16", "amp_fp16", "amp_bf16")
"""The first that the device has a peak for."""


def with_usual(config: RunConfig, cluster: Cluster | None = None) -> RunConfig:
    """The config with these defaults, which still count as left open; the same config for any other model.

    Args:
        config: of a question. cluster: where it was given as a value.

    Raises:
        ProfileError: the cluster that the config names cannot be read.
        ConfigError: an axis of plan.mesh does not divide the model, or a key belongs to another precision.
    """
    found = _filled_in(config, cluster)
    check_widths(found.training)
    return found


def _filled_in(config: RunConfig, cluster: Cluster | None) -> RunConfig:
    row = named(config.model.name)
    if row is None or row.shape is None:
        return _of_transformers(config, cluster) if takes_usual(config.model.name) and not _is_saved(config) else config
    check_splits(config)
    training: dict[str, Any] = {"optimizer": OPTIMIZER, "precision": _precision(config, cluster)}
    table = config.plan.mesh
    cut = config.plan.strategy not in ("single", "dp") and (table is None or table.tp != 1)
    model = {"granularity": "sublayer" if cut else "block"}
    return config.model_copy(update={"training": _filled(config.training, training), "model": _filled(config.model, model)})


def _is_saved(config: RunConfig) -> bool:
    """A finished Model, of any architecture and with weights of one width."""
    from parsim.workflow.load import is_saved_model

    return is_config(config.model.name) and is_saved_model(Path(config.model.name))


def _of_transformers(config: RunConfig, cluster: Cluster | None) -> RunConfig:
    device = _device(config, cluster)
    if device is None or device.kind == "cpu":
        return config
    training = {"optimizer": OPTIMIZER, "precision": _precision(config, cluster)}
    return config.model_copy(update={"training": _filled(config.training, training)})


def _precision(config: RunConfig, cluster: Cluster | None) -> str:
    if "precision" in config.training.model_fields_set or config.training.dtype != "float32":
        return config.training.precision
    device = _device(config, cluster)
    peaks = device.peak_flop_per_s if device is not None else {}
    return next((name for name in PRECISIONS if name in peaks), config.training.precision)


def _device(config: RunConfig, cluster: Cluster | None) -> DeviceType | None:
    """The first device's type; None for this machine, which may not have been calibrated yet."""
    if cluster is None and config.cluster.machine == "this-machine":
        return None
    from parsim.workflow.load import cluster_of

    return (cluster or cluster_of(config)).devices[0].type


def _filled(section: Any, values: dict[str, Any]) -> ConfigSection:
    """A section with values for keys that were left out; they stay left out for whoever asks what was given."""
    given = set(section.model_fields_set)
    new = {key: value for key, value in values.items() if key not in given}
    found: ConfigSection = type(section).model_construct(_fields_set=given, **{**dict(section), **new})
    return found
