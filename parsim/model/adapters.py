"""Low-rank adapters in a torch module: linear layers that are frozen and have one (`parsim.model.tuning`).

Names of parameters are those of peft (`q_proj.base_layer.weight`, `q_proj.lora_A.default.weight`), which can read them back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torch import Tensor, nn

from parsim.errors import ModelError, first_few, near_matches
from parsim.model.tuning import ALL, HEAD, Tuning

GROUPS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"attn|attention", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|feed_?forward|expert", re.IGNORECASE),
}
"""Words for several layers, by what their path has."""
ADAPTER = "default"
"""What peft calls an adapter that nobody named."""


class AdaptedLinear(nn.Module):
    """y = W x + b + (alpha / r) B A x, with W and b frozen; B begins at zero, so that the module begins as it was.
    Source: Hu et al. 2021, section 4.1; initial values as in peft/tuners/lora/layer.py, reset_lora_parameters."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, tuning: Tuning) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base_layer = base
        self.lora_dropout = nn.Dropout(tuning.dropout) if tuning.dropout else nn.Identity()
        down, up = nn.Linear(inputs, tuning.rank, bias=False, **like), nn.Linear(tuning.rank, outputs, bias=False, **like)
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER: down}), nn.ModuleDict({ADAPTER: up})
        self.scale = tuning.scale
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)

    def forward(self, x: Tensor) -> Tensor:
        low_rank: Tensor = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout(x)))
        y: Tensor = self.base_layer(x) + low_rank * self.scale
        return y


def adapt(module: nn.Module, tuning: Tuning | None) -> nn.Module:
    """The module, of which `tuning` trains a part; it is changed in place.
    Raises ModelError: no layer is among the targets, or the module has no last linear layer that could be trained alone."""
    if tuning is None or tuning.method == "full":
        return module
    layers = _linear_layers(module)
    if not layers:
        raise ModelError(f"training.tune: {type(module).__name__} has no linear layer to adapt; drop training.tune")
    head = _head_of(module, layers)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if tuning.method == HEAD:
        _train_head(module, layers[head], head)
        return module
    for name in _targets(module, tuning, layers, head):
        layer, (owner, _, own_name) = layers[name], name.rpartition(".")
        weight: Tensor = layer.get_parameter("weight")
        outputs, inputs = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
        setattr(module.get_submodule(owner), own_name, AdaptedLinear(layer, inputs, outputs, tuning))
    return module


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """By path every layer that multiplies by a weight when it is called; those of nn.MultiheadAttention are never called."""
    inside = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, nn.MultiheadAttention))
    return {
        path: part
        for path, part in module.named_modules()
        if path and (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D") and not path.startswith(inside or ("\0",))
    }


def _head_of(module: nn.Module, layers: Mapping[str, nn.Module]) -> str:
    """The path of the layer that makes the output: the one that transformers names, else the last."""
    named = getattr(module, "get_output_embeddings", lambda: None)()
    return next((path for path, layer in layers.items() if layer is named), list(layers)[-1])


def _train_head(module: nn.Module, head: nn.Module, path: str) -> None:
    for parameter in head.parameters():
        users = [owner for owner, part in module.named_modules() for own in part.parameters(recurse=False) if own is parameter]
        if len(users) > 1:
            raise ModelError(
                f"training.tune: the head {path} shares its weight with {first_few(users)}, so training it alone would train "
                'that too; set training.tune = "lora" or "full"'
            )
        parameter.requires_grad_(True)


def _targets(module: nn.Module, tuning: Tuning, layers: Mapping[str, nn.Module], head: str) -> list[str]:
    """The layers that have adapters, in the order of the module."""
    found: set[str] = set()
    for target in tuning.targets or (ALL,):
        if target in (ALL, "all-linear"):
            matching = [path for path in layers if path != head] or [head]
        elif target == HEAD:
            matching = [head]
        elif target in GROUPS:
            matching = [path for path in layers if path != head and GROUPS[target].search(path)]
        else:
            matching = [path for path in layers if path == target or path.endswith(f".{target}")]
        if not matching:
            names = list(dict.fromkeys(path.rpartition(".")[2] for path in layers))
            raise ModelError(
                f"training.tune.targets: {target!r} is no linear layer of {type(module).__name__}"
                f"{near_matches(target, names)}; it has {first_few(names)}"
            )
        found.update(matching)
    return [path for path in layers if path in found]
