"""A mask whose count later calls fix selects by places: as eager does, and an error where eager fails too."""

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError, DataCheckError
from autopar.oracle.reference import parameters_of, run_captured
from tests.as_eager import assert_as_eager


class Margin(nn.Module):
    """The score of each sample's own class, by a mask of the labels, as margin losses have it."""

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.fixed = fixed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.linear(x)
        own = scores[mask]
        margins = own - x[:, 0] if self.fixed else own
        return margins.square().sum() + scores.square().mean()


def one_hot(rows: int) -> Tensor:
    return torch.eye(5, dtype=torch.bool)[torch.arange(rows) % 5]


def test_a_selection_of_known_size_is_eager() -> None:
    assert_as_eager(Margin().double(), {"x": torch.randn(4, 4, dtype=torch.float64), "mask": one_hot(4)})


def test_another_count_is_an_error_with_the_line() -> None:
    model = Margin()
    x, mask = torch.randn(4, 4), one_hot(4)
    captured = capture(model, (x, mask))
    mask[0] = False
    inputs = {spec.placeholder: {"0": x, "1": mask}[spec.path] for spec in captured.inputs}
    with pytest.raises(DataCheckError, match=r"test_fixed_sizes.py:\d+: the mask selects other than 4 places"):
        run_captured(captured, parameters_of(captured, model), {}, inputs)


def test_a_count_that_nothing_fixes_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on the data"):
        capture(Margin(fixed=False), (torch.randn(4, 4), one_hot(4)))
