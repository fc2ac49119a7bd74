"""A model from the meta device runs with the buffers that its constructor computes, or not at all."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ArgumentError
from autopar.runtime import reset_buffers
from tests.process_group import ranks


class Net(nn.Module):
    """Buffers that no state dict has: of the model, and of a part in which a draw is."""

    scale: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 3.0), persistent=False)
        self.b.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift: Tensor = self.b.shift  # type: ignore[assignment]
        return (self.b((self.a(x) * self.scale).tanh()) + shift - y).square().mean()


def batch() -> dict[str, Tensor]:
    x, y = torch.linspace(-1, 1, 64).view(2, 4, 8)
    return {"x": x, "y": y}


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def filled(baseline: str) -> None:
    plan = autopar.plan(on_meta(), batch(), cluster="2xcpu", baseline=baseline, with_baselines=False)
    real = Net()
    module = autopar.distribute(on_meta(), plan)
    assert all(value.isnan().all() for value in module.state_dict().values())
    with pytest.raises(ArgumentError, match="load a state dict first"):
        module.train_step(batch())  # type: ignore[operator]
    torch.manual_seed(0)
    module.load_state_dict(real.state_dict())
    left = module.still_empty()  # type: ignore[operator]
    assert left and left <= {"scale", "b.shift"}
    for gradients in (True, False):
        said = pytest.raises(
            ArgumentError, match=r"no state dict or checkpoint has them.*reset_buffers\(module, build\)"
        )
        with said, torch.set_grad_enabled(gradients):
            module.train_step(batch()) if gradients else module(**batch())  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="on the meta device; have it make the whole model on a real device"):
        reset_buffers(module, on_meta)
    reset_buffers(module, Net)
    assert not module.still_empty()  # type: ignore[operator]
    expected = real(**batch())
    module.load_state_dict(real.state_dict())
    torch.testing.assert_close(module.train_step(batch()), expected.detach())  # type: ignore[operator]


@pytest.mark.parametrize("baseline", ["fsdp", "ddp:pp=2,mbs=2"])
def test_buffers_are_computed_or_the_module_does_not_run(baseline: str) -> None:
    ranks(2).run(filled, baseline)


def written() -> None:
    real = Net()
    plan = autopar.plan(on_meta(), batch(), cluster="2xcpu", baseline="ddp", with_baselines=False)
    module = autopar.distribute(on_meta(), plan)
    module.load_state_dict(real.state_dict())
    module.get_buffer("scale").copy_(real.scale)
    with pytest.raises(ArgumentError, match=r"1 buffers \(b\.shift\) have no value"):
        module(**batch())
    module.b.shift = real.b.shift.clone()  # type: ignore[operator,union-attr]
    module.load_state_dict(real.state_dict())
    torch.testing.assert_close(module(**batch()), real(**batch()))
    module.to_empty(device="cpu")
    with pytest.raises(ArgumentError, match="6 parameters and buffers"):
        module(**batch())
    with torch.device("meta"):
        decorated = autopar.auto_parallel(Net(), cluster="2xcpu", baseline="ddp", with_baselines=False)
    decorated.distribute(batch())
    decorated.load_state_dict(real.state_dict())
    reset_buffers(decorated, Net)
    torch.testing.assert_close(decorated(**batch()), real(**batch()))


def test_what_is_written_in_place_or_exchanged_has_a_value() -> None:
    ranks(2).run(written)
