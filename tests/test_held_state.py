"""A tensor that a model holds twice is one: from a list, dict, tuple or object it is read with its gradient."""

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.held_state import HeldState
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager


class Holder:
    """No module."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight = weight
        self.deep = {"bias": [bias]}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.listed = [self.weight, self.linear.bias]
        self.named = {"weight": self.weight, "bias": self.linear.bias}
        self.both = ("a", (self.weight, self.linear.bias))
        self.holder = Holder(self.weight, self.linear.bias)
        self.function = closing_over(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "list":
            y = y * self.listed[0] + self.listed[1]
        elif self.kind == "dict":
            y = y * self.named["weight"] + self.named["bias"]
        elif self.kind == "tuple":
            y = y * self.both[1][0] + self.both[1][1]
        elif self.kind == "object":
            y = y * self.holder.weight + self.holder.deep["bias"][0]
        elif self.kind == "written":
            with torch.no_grad():
                self.listed[0].clamp_(min=0.1)
            y = y * self.named["weight"]
        else:
            y = self.function(y)
        return y.square().sum()


def closing_over(weight: Tensor):  # type: ignore[no-untyped-def]
    return lambda y: y * weight


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "object", "written"])
def test_second_references_have_the_gradient(kind: str) -> None:
    model = Model(kind).double()
    assert_as_eager(model, {"x": torch.randn(4, 4, dtype=torch.float64)})


def test_a_closure_over_a_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"reads weight .* through a closure or a global"):
        capture(Model("closure"), (torch.randn(3, 4),))


def test_the_model_holds_its_own_tensors_again_afterwards() -> None:
    model = Model("dict")
    held = HeldState(model)
    other = nn.Parameter(torch.zeros(4))
    weight, model._parameters["weight"] = model.weight, other
    with held.followed():
        assert model.named["weight"] is other and model.both[1][0] is other and model.holder.weight is other
    assert model.named["weight"] is weight and model.both[1][0] is weight and model.holder.weight is weight
