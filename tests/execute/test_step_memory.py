"""The predicted peak of live bytes against a real step on one rank, for modules that show one effect each."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from parsim.model.component import PAGE_BYTES  # noqa: E402
from parsim.model.trace.fakes import lstm_workspace_arrays  # noqa: E402
from tests.matrix.catalogue import _SEQUENCE, _VISION  # noqa: E402
from tests.matrix.checks import Subject  # noqa: E402
from tests.matrix.checks import memory as assert_memory  # noqa: E402

ROWS = {**_VISION, **_SEQUENCE}


EFFECTS = {
    "dense blocks": "a backward lets go of the input that it alone keeps",
    "weight norm": "a backward lets go of the input that it alone keeps",
    "inception": "values wait for readers and gradients for makers",
    "triplet": "values wait for readers and gradients for makers",
    "graph, dense": "an input that no backward needs is let go",
    "frozen backbone": "a frozen part has no backward",
}


@pytest.mark.parametrize("name", EFFECTS)
def test_the_peak_of_a_step(name: str) -> None:
    assert_memory(Subject(ROWS[name]))


@pytest.mark.parametrize("name", ["LSTM", "bidirectional LSTM"])
def test_arrays_of_an_lstm_begin_on_pages(name: str) -> None:
    """Up to 8% of a step of 100 KB: counted for the samples that a rank has."""
    subject = Subject(ROWS[name])
    assert any(component.paged_bytes for component in subject.model.components)
    assert_memory(subject)


@pytest.mark.parametrize(
    ("length", "batch", "features", "hidden"),
    [
        (6, 3, 16, 16),
        (6, 2, 16, 16),
        (6, 3, 32, 16),
        (6, 3, 16, 32),
        (1, 1, 16, 16),
        (10, 64, 100, 128),
        (7, 33, 48, 48),
        (20, 8, 64, 256),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_of_an_lstm_is_that_of_the_kernel(
    length: int, batch: int, features: int, hidden: int, dtype: torch.dtype
) -> None:
    """Byte for byte with the pages that each array begins on. Under autocast cells are in half precision too."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor's kernels take no bfloat16")
    weights = [weight.detach().to(dtype) for weight in torch.nn.LSTM(features, hidden).parameters()]
    given, state = torch.randn(length, batch, features, dtype=dtype), torch.zeros(1, batch, hidden, dtype=dtype)
    no_sizes: list[int] = []
    settings = (False, no_sizes, 2, hidden, 1, True, False, False, True)
    workspace = torch.ops.aten.mkldnn_rnn_layer(given, *weights, state, state, *settings)[3]
    arrays = lstm_workspace_arrays(length, batch, features, hidden, dtype.itemsize, dtype.itemsize)
    assert workspace.numel() == sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in arrays)
