"""CLIPModel as it trains: its forward returns the contrastive loss, taken in an order that keeps pairs of samples in the loss.

transformers' own forward multiplies texts by images before it scales the product. Here images are scaled first. Parameters,
their names and the loss are the same, up to rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

CONTRASTIVE = ("CLIPModel",)
"""Architectures that can be built so."""


def trains_by_contrast(architecture: str) -> bool:
    """Whether `with_its_loss` knows it."""
    return architecture in CONTRASTIVE


@lru_cache(maxsize=8)
def with_its_loss(kind: Any) -> Any:
    """A class of the same name and parameters whose forward returns {"loss", "image_embeds", "text_embeds"}.

    The loss is the mean of two cross-entropies, as transformers' own `image_text_contrastive_loss` takes it. It is a scalar.

    Args:
        kind: a class of transformers that `trains_by_contrast`.
    """
    from torch import arange
    from torch.nn.functional import cross_entropy, normalize

    def forward(self: Any, input_ids: Any, pixel_values: Any) -> dict[str, Any]:
        images = normalize(self.get_image_features(pixel_values).pooler_output) * self.logit_scale.exp()
        texts = normalize(self.get_text_features(input_ids).pooler_output)
        scores = texts @ images.t()
        own = arange(len(scores), device=scores.device)
        loss = (cross_entropy(scores, own) + cross_entropy(scores.t(), own)) / 2
        return {"loss": loss, "image_embeds": images, "text_embeds": texts}

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
