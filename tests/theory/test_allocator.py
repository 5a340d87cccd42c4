"""What a rank holds beside its tensors: found where it is planted, kept in a profile, used by whoever asks for memory."""

from __future__ import annotations

import mmap
from functools import partial

import pytest
from pydantic import ValidationError

pytest.importorskip("torch")

import torch

from calibration.fit.build_profile import LIBRARY_MARGIN_BYTES, allocator_entry
from calibration.measure.allocator import distinct_bytes, measure_allocator
from calibration.measure.components import make_case
from calibration.rounds.request import CalibrationRequest
from parsim.execute.processes.machine import forget_peak, peak_resident_bytes, resident_bytes
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import DEVICE_KINDS, Allocator, Spread
from parsim.hardware.profile import Profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.units import MIB

MLP = ModelSpec(name="mlp", args=(("width", 64),), input_shape=(1, 32, 32))
REQUEST = CalibrationRequest(models=((MLP, (4, 8)),))
ASSUMED = Allocator(library_bytes=Spread(1.0, 2.0, 3.0), lost_share=Spread(0.0, 0.1, 0.5))


def test_the_share_is_assumed_and_the_libraries_are_what_is_left() -> None:
    cases = ((1e6, 100), (4e7, 108), (9e8, 94))
    seen = [
        {"beside_bytes": library * MIB + 0.1 * size, "dynamic_bytes": size, "reading_bytes": 30 * MIB}
        for size, library in cases
    ]
    found = allocator_entry(seen, ASSUMED)
    assert found is not None
    assert found.library_bytes.median == pytest.approx(100 * MIB)
    assert found.library_bytes.p05 == pytest.approx((94 - 30) * MIB - LIBRARY_MARGIN_BYTES)
    assert found.library_bytes.p95 == pytest.approx(108 * MIB + LIBRARY_MARGIN_BYTES)
    assert found.lost_share == ASSUMED.lost_share
    assert allocator_entry([], ASSUMED) is None
    lean = allocator_entry([{"beside_bytes": -5 * MIB, "dynamic_bytes": 0, "reading_bytes": 0}], ASSUMED)
    assert lean is not None
    assert lean.library_bytes.p05 == lean.library_bytes.median == 0


def test_a_profile_that_measured_it_is_believed_and_others_are_assumed() -> None:
    shipped = load_profile("dgx1-v100-32gb")
    name, entry = next(iter(shipped.device_types.items()))
    assert cluster_from_profile(shipped).devices[0].type.allocator == DEVICE_KINDS["cuda"].allocator
    measured = allocator_entry(
        [{"beside_bytes": 300 * MIB, "dynamic_bytes": 0, "reading_bytes": 0}], DEVICE_KINDS["cuda"].allocator
    )
    assert measured is not None
    types = {name: entry.model_copy(update={"allocator": measured.model_copy(update={"source": "context"})})}
    profile = Profile.model_validate_json(shipped.model_copy(update={"device_types": types}).model_dump_json())
    (device, *_) = cluster_from_profile(profile).devices
    assert device.type.allocator.library_bytes == Spread(284 * MIB, 300 * MIB, 316 * MIB)
    assert device.type.allocator.lost_share == DEVICE_KINDS["cuda"].allocator.lost_share


def test_quantiles_that_descend_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"p05 2, median 1, p95 3 must be finite, >= 0 and in ascending order"):
        Allocator(library_bytes=Spread(2, 1, 3), lost_share=Spread(0, 0, 0))


def test_storages_are_counted_once() -> None:
    whole = torch.zeros(100)
    assert distinct_bytes([whole, whole[:10], whole.view(10, 10), torch.zeros(3)]) == 412


@pytest.mark.slow
@pytest.mark.skipif(not forget_peak(), reason="this system keeps no peak of the resident set")
def test_what_is_held_beside_tensors_is_found() -> None:
    """64 MiB that no tensor owns: they are beside the tensors. The case itself leaves nothing behind."""
    make = [partial(make_case, 0, MLP, load_model(MLP), 8, REQUEST, torch.device("cpu"))]
    context = resident_bytes()
    measure_allocator(make, context)  # libraries are loaded, pools filled
    (before,) = measure_allocator(make, context)
    held = 64 * MIB * bytearray(b"x")
    (beside,) = measure_allocator(make, context)
    assert len(held) == 64 * MIB
    assert beside["beside_bytes"] - before["beside_bytes"] == pytest.approx(64 * MIB, abs=6 * MIB)
    assert (before["model"], before["samples"]) == (0, 8)
    elements = load_model(MLP).parameter_count
    kept = before["live_bytes"] - before["dynamic_bytes"]
    assert kept == pytest.approx(3 * 4 * elements, rel=0.02), "parameters, gradients and momentum"
    assert 0 < before["dynamic_bytes"] < 4 * MIB


@pytest.mark.skipif(not forget_peak(), reason="this system keeps no peak of the resident set")
def test_the_peak_starts_anew() -> None:
    held = mmap.mmap(-1, 32 * MIB)  # pages of their own: memory of the heap is not always given back
    for page in range(0, 32 * MIB, mmap.PAGESIZE):
        held[page] = 1
    assert peak_resident_bytes() >= resident_bytes() - MIB
    high = peak_resident_bytes()
    held.close()
    assert forget_peak()
    assert peak_resident_bytes() <= high - 16 * MIB
