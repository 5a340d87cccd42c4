"""The shape of a model that a row names, of the table `parsim.model.catalogue.names`, reduced where the row says so."""

from __future__ import annotations

import re
from dataclasses import replace

from parsim.model.catalogue.names import named
from parsim.model.catalogue.sublayers import Shape


def shape_of_name(name: str) -> Shape | None:
    """The shape of a model by its name, reduced to so many layers where the name says so; None: not known."""
    reduced = re.search(r"reduced to (\d+) layers", name)
    found = named(re.sub(r"\s*reduced to.*", "", name))
    if found is None or found.shape is None:
        return None
    if reduced is None:
        return found.shape
    layers = int(reduced[1])
    return replace(found.shape, layers=layers, dense_layers=min(found.shape.dense_layers, 1))
