"""What of a plan lies in the host's memory: the optimizer's state, and activations that are saved for the backward.

Optimizer: state and master weights. Once a bucket's gradients are complete on a rank, those that the rank updates with (whole,
or its part under ZeRO) are copied to the host. When all have come, the host updates bucket by bucket, and the new parameters
are copied back. So gradients are accumulated, summed and clipped on the device.

Activations: what a component saves is copied behind its forward, and fetched before its backward. A rank begins a
computation only when what the computation before the last one saved has left. It fetches one computation ahead. So a device
holds what is saved of two or three components at once. A component that is recomputed keeps its inputs, which are copied
likewise. A value that several components save is copied with the last of them. It stays on the device if one of them is not
offloaded. So do samples of the batch, and values that came from another stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from parsim.errors import PlanError, near_matches

ActivationOffload = bool | tuple[str, ...]


def normalised_offload(given: ActivationOffload, components: Sequence[str]) -> ActivationOffload:
    """The one way to write the choice: names in execution order, True for all of them, False for none.

    Raises PlanError for a name that is no component of the plan.
    """
    if isinstance(given, bool):
        return given
    for name in given:
        if name not in components:
            raise PlanError(
                f"activation_offload names {name!r}, which is no component of the plan{near_matches(name, components)}"
            )
    chosen = tuple(name for name in components if name in set(given))
    return len(chosen) == len(components) or (chosen or False)


def offloaded_names(offload: ActivationOffload, components: Sequence[str]) -> frozenset[str]:
    """The components that a normalised choice names."""
    if isinstance(offload, bool):
        return frozenset(components if offload else ())
    return frozenset(offload)


def check_offload(*, optimizer: bool, activations: bool, halves: bool, segments: bool, relaxed: bool) -> None:
    """Raise PlanError where a plan has something that offload does not go with.

    Args:
        optimizer, activations: what is offloaded. halves: the pipeline order runs backwards in halves. segments: the plan has
            some. relaxed: so is its synchronisation.
    """
    if (optimizer or activations) and relaxed:
        key = "optimizer_offload" if optimizer else "activation_offload"
        raise PlanError(f"{key} belongs to synchronous training, and the plan's synchronisation is another; drop one of them")
    if activations and halves:
        raise PlanError(
            "activation_offload fetches what one whole backward needs, and the pipeline order runs backwards in halves; use "
            "1f1b, gpipe or interleaved, or drop activation_offload"
        )
    if activations and segments:
        raise PlanError(
            "activation_offload copies what single components keep, and segments keep what enters several; list components in "
            "recompute instead of segments, or drop activation_offload"
        )
