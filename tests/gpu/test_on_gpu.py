"""On a real GPU: the device's queue, products of every precision, the executor against eager torch. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from experiments.common.reference import train_reference
from parsim.execute.cuda.driver import TorchCudaDriver
from parsim.execute.rank_run import make_streams
from parsim.execute.runtime import RankProgram
from parsim.execute.stage import StageReplica
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from tools.gpu.copies import measure_copy
from tools.gpu.device import MeasuredDevice, cuda_device
from tools.gpu.launches import event_cost, graph_cost, launch_cost
from tools.gpu.products import PRECISIONS, Product, measure_product
from tools.gpu.timing import time_calls

pytestmark = pytest.mark.gpu

LARGE = Product(rows=4096, columns=4096, depth=4096)


@pytest.fixture(scope="module")
def device() -> MeasuredDevice:
    return cuda_device()


def test_a_hold_takes_its_time_and_holds_the_queue(device: MeasuredDevice) -> None:
    clock = device.clock
    begin = clock.mark()
    clock.hold(0.05)
    end = clock.mark()
    assert not clock.passed(end)
    clock.synchronize()
    assert clock.passed(end)
    assert clock.elapsed_s(begin, end) == pytest.approx(0.05, rel=0.3)


def test_a_small_kernel_takes_less_than_the_host_needs_to_launch_it(device: MeasuredDevice) -> None:
    cost = launch_cost(device)
    assert cost["queued"]
    assert 1e-7 < cost["device_s"] < 1e-4
    assert 1e-7 < cost["host_s"] < 1e-3
    assert 0 < event_cost(device.clock)["between_s"] < 1e-4
    assert graph_cost(device)["device_per_kernel_s"] < 2 * cost["device_s"]


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_products_are_right_queued_and_from_beyond_the_cache(device: MeasuredDevice, name: str) -> None:
    row = measure_product(device, LARGE, PRECISIONS[name], least_s=0.1)
    assert row["queued"]
    assert row["beyond_cache"]
    assert row["flop_per_s"] > 1e12


def test_half_precision_is_faster_than_ieee(device: MeasuredDevice) -> None:
    rates = [measure_product(device, LARGE, PRECISIONS[name], least_s=0.1)["flop_per_s"] for name in ("bf16", "fp32")]
    assert rates[0] > 2 * rates[1]


def test_twice_the_bytes_take_twice_as_long(device: MeasuredDevice) -> None:
    small, large = (measure_copy(device, "on_device", size, least_s=0.1) for size in (2**28, 2**29))
    assert large["median_s"] / small["median_s"] == pytest.approx(2.0, rel=0.15)


def test_the_allocator_knows_nothing_of_what_a_transfer_is_given(device: MeasuredDevice) -> None:
    """NCCL calls `record_stream` for what is sent and received, after which the allocator gives the memory back late."""
    driver, side = TorchCudaDriver(torch.device("cuda", torch.cuda.current_device())), torch.cuda.Stream()
    again = []
    for given in (driver.unowned, lambda tensor: tensor):
        value = torch.zeros(2**26, device="cuda")
        address = value.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            driver.hold(0.05)
        given(value).record_stream(side)
        del value
        again.append(torch.empty(2**26, device="cuda").data_ptr() == address)
        torch.cuda.synchronize()
    assert again == [True, False]


def test_timing_twice_gives_the_same(device: MeasuredDevice) -> None:
    tensor = torch.randn(2**26, device=device.device)
    one, other = (time_calls(device.clock, [lambda: tensor.neg_()], least_s=0.3).median_s for _ in range(2))
    assert one == pytest.approx(other, rel=0.1)


def test_the_executor_trains_what_plain_training_on_the_cpu_does(device: MeasuredDevice) -> None:
    """float64, four steps of a small model, samples of the same order."""
    from parsim.data import dataset_for
    from parsim.data.samples import BatchOrder

    spec, batch, steps = ModelSpec(name="vit_small"), 4, 4
    model = load_model(spec)
    stage_of = Stage(components=tuple(component.name for component in model.components), ranks=(0,))
    plan = Plan(strategy="single", mesh=Mesh(), stages=(stage_of,), global_batch=batch)
    data = dataset_for(spec, "synthetic", root=None, split="train", seed=0)
    expected = train_reference(
        spec, plan, data, optimizer="sgd_momentum", learning_rate=1e-2, dtype=torch.float64, seed=0, steps=steps
    )
    stage = StageReplica(
        spec,
        PlanIndex(plan, model),
        0,
        optimizer="sgd_momentum",
        learning_rate=1e-2,
        dtype=torch.float64,
        seed=0,
        device=device.device,
    )
    streams = make_streams(device.device)
    program = RankProgram(lower(plan, model), stage, streams, {})
    order = BatchOrder(n=len(data), global_batch=batch, seed=0)
    losses = []
    for step in range(steps):
        inputs, targets = data.batch(order.indices(step))
        values = {
            "input:0": torch.from_numpy(inputs).to(device.device, torch.float64),
            "target": torch.from_numpy(targets).to(device.device),
        }
        losses.append(program.step(lambda _, values=values: values)[0] / batch)
    streams.close()
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    for name, parameter in stage.parameters.items():
        torch.testing.assert_close(parameter.detach().cpu(), expected.parameters[name], rtol=1e-9, atol=1e-12)
