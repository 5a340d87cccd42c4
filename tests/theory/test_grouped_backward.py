"""The backward of products grouped by expert as one operator, for versions of transformers that have none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parsim.model.catalogue.hugging_face import define_backward

TOKENS, WEIGHTS, ENDS = (7, 4), (3, 4, 5), [3, 3, 7]
"""The second expert has no token."""


def test_it_is_that_of_one_product_per_expert() -> None:
    define_backward()
    torch.manual_seed(0)
    tokens, weights = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (TOKENS, WEIGHTS))
    gradient = torch.randn(TOKENS[0], WEIGHTS[2], dtype=torch.float64)
    places: list[Tensor] = [tokens[start:end] @ weight for start, end, weight in zip([0, *ENDS], ENDS, weights, strict=False)]
    expected = torch.autograd.grad(torch.cat(places), (tokens, weights), gradient)
    found = torch.ops.parsim.grouped_mm_backward(tokens.detach(), weights.detach(), torch.tensor(ENDS), gradient)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_it_has_shapes_without_numbers() -> None:
    define_backward()
    with FakeTensorMode():
        tokens, weights, gradient = torch.empty(TOKENS), torch.empty(WEIGHTS), torch.empty(TOKENS[0], WEIGHTS[2])
        ends = torch.empty(len(ENDS), dtype=torch.int32)
        found = torch.ops.parsim.grouped_mm_backward(tokens, weights, ends, gradient)
    assert [tuple(entry.shape) for entry in found] == [TOKENS, WEIGHTS]
