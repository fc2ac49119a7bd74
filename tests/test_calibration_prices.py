"""What calibration measures and checks is what planning prices: the same bytes of an operation, the same formulas."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autopar.calibration import measure_work
from autopar.calibration.predict import predicted_work
from autopar.calibration.samples import WorkSample
from autopar.capture import capture
from autopar.lower.program import make_program
from autopar.search.costs.pricing import make_pricer
from autopar.values.cluster import load_cluster
from autopar.values.device import Device
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig

CALIBRATED = Device(
    name="synthetic", peak_flops=(("fp32", 5e10),), memory_bytes=10**10, memory_bandwidth=8e9, launch_seconds=2e-5,
    efficiency=1.0,
)  # fmt: skip


def test_what_is_measured_is_what_planning_prices() -> None:
    """The bytes of each measured operation are its rule's, and a file's seconds are a plan's: by fitted constants on a
    device that has them, by the roofline on a calibrated one."""
    cases = {
        "silu": (measure_work._silu(4096, torch.device("cpu")), lambda p: F.silu(p[0]), [(4096,)]),
        "mul": (measure_work._product_of_two(4096, torch.device("cpu")), lambda p: p[0] * p[1], [(4096,)] * 2),
        "softmax": (measure_work._softmax(4096, torch.device("cpu")), lambda p: p[0].softmax(-1), [(32, 128)]),
        "linear": (
            measure_work._product((64, 128, 32), "fp32", torch.device("cpu")),
            lambda p: F.linear(p[0], p[1]),
            [(64, 128), (32, 128)],
        ),
    }
    mine = replace(load_cluster("1xa100"), device=CALIBRATED)
    for name, (work, function, shapes) in cases.items():

        class Loss(torch.nn.Module):
            def __init__(self, shapes: list[tuple[int, ...]] = shapes) -> None:
                super().__init__()
                self.p = torch.nn.ParameterList(torch.ones(shape) for shape in shapes)

            def forward(self, x: torch.Tensor, function: Callable[..., torch.Tensor] = function) -> torch.Tensor:
                return function(self.p).sum() + x.sum()

        program = make_program(capture(Loss(), (torch.ones(2),), {}))
        [op] = [op for op in program.ops if name in op.name]
        sample = WorkSample(
            name=name, dtype="fp32", product=work.product, nbytes=work.nbytes, backward_nbytes=work.backward_nbytes,
            seconds=1.0,
        )  # fmt: skip
        for cluster, rates in ((load_cluster("1xa100"), "fitted constants of a100"), (mine, "roofline of")):
            pricer = make_pricer(mesh=make_mesh((1,)), cluster=cluster, config=TrainConfig(precision="fp32"))
            assert pricer.rates.name.startswith(rates)
            price = pricer.op(op, next((way,) for way in op.choices if pricer.target.is_allowed(op, (way,))))
            assert predicted_work(cluster, sample) == pytest.approx(price.forward + price.backward, rel=1e-9), name
