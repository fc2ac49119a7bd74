"""Values that follow from sizes alone carry no gradient, and reach kernels as those read them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from tests.as_eager import assert_as_eager, assert_shards_as_whole

WIDTH = 8


class Normed(nn.Module):
    """Batch norm whose statistics are constants: its kernel reads their memory whatever their strides."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.uses_batch = training

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mean, variance = torch.zeros(WIDTH, dtype=h.dtype), torch.full((WIDTH,), 2.0, dtype=h.dtype)
        return F.batch_norm(h, mean, variance, training=self.uses_batch).pow(3).mean()


class Choosing(nn.Module):
    """A one-hot choice, made of `zeros_like`, to which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gumbel_softmax(self.a(x), hard=True)).square().mean()  # type: ignore[no-any-return]


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64)}


def test_constant_statistics_have_their_gradients() -> None:
    for training in (False, True):
        assert_as_eager(Normed(training), inputs())


def test_messages_of_a_hard_choice_are_those_predicted() -> None:
    own = Choosing()
    assert_shards_as_whole(capture(own, (), inputs()), own, inputs(), plans=6)
