"""Small losses of a model's output, by what they do to the samples of a batch: treat each alone, or join them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, STEPS, WIDTH = 8, 3, 4
Loss = Callable[[Tensor, Any], Tensor]


class Net(nn.Module):
    """`[batch, steps, width]` to the same, with a buffer that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    """x and y; a micro-batch has the first rows of both."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, BATCH, STEPS, WIDTH, dtype=torch.float64, generator=generator)[:, :rows])  # type: ignore[return-value]


def labels(b: Any) -> Tensor:
    """A class a step, some ignored, in the first samples more often."""
    found: Tensor = b[1].argmax(-1)
    return torch.where(b[1][..., 0] > 1.0 - b[1][..., 1].abs(), -100, found)


def contrastive(o: Tensor, b: Any) -> Tensor:
    a, t = F.normalize(o.flatten(1), dim=-1), F.normalize(b[1].flatten(1), dim=-1)
    return F.cross_entropy(10 * a @ t.t(), torch.arange(o.shape[0]))


def triplet(o: Tensor, b: Any) -> Tensor:
    return F.triplet_margin_loss(o.flatten(1), b[1].flatten(1), b[1].flip(0).flatten(1))


def ranking(o: Tensor, b: Any) -> Tensor:
    score, wanted = o.mean((1, 2)), b[1].mean((1, 2))
    return F.softplus(-(score[:, None] - score[None]) * (wanted[:, None] - wanted[None]).sign()).mean()


def moments(o: Tensor, b: Any) -> Tensor:
    x = o.flatten(1)
    x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    return (x.t() @ x / len(x) - torch.eye(x.shape[1])).square().sum()


def balance(o: Tensor, b: Any) -> Tensor:
    """Of a mixture of experts, a product of two means over tokens."""
    rows = o.reshape(-1, WIDTH).softmax(-1)
    chosen = F.one_hot(rows.topk(2, dim=-1).indices, WIDTH).double().sum(1)
    return (chosen.mean(0) * rows.mean(0)).sum() * WIDTH


def norm_of_batch(o: Tensor, b: Any) -> Tensor:
    return (F.batch_norm(o.flatten(1), None, None, training=True) - b[1].flatten(1)).square().mean()


def two_views(o: Tensor, b: Any) -> Tensor:
    first, second = (torch.cat([o, b[1]]) * 2).chunk(2)
    return (first * second).mean()


def steps_first(o: Tensor, b: Any) -> Tensor:
    x = o.transpose(0, 1)
    return F.cross_entropy(x.reshape(-1, WIDTH), labels(b).t().reshape(-1))


def picked(o: Tensor, b: Any) -> Tensor:
    return -o[:, 0].log_softmax(-1)[torch.arange(o.shape[0]), b[1][:, 0].argmax(-1)].mean()


def attended(o: Tensor, b: Any) -> Tensor:
    return (F.scaled_dot_product_attention(o, o, o, is_causal=True) - b[1]).square().mean()


def attended_over_samples(o: Tensor, b: Any) -> Tensor:
    x = o.transpose(0, 1)
    return (F.scaled_dot_product_attention(x, x, x) - b[1].transpose(0, 1)).square().mean()


ALONE: dict[str, Loss] = {
    "mean": lambda o, b: (o - b[1]).square().mean(),
    "sum": lambda o, b: (o - b[1]).square().sum(),
    "mean over the batch, sum over features": lambda o, b: (o - b[1]).square().mean(0).sum(),
    "sum over the batch, mean over features": lambda o, b: (o - b[1]).square().sum(0).mean(),
    "mean over features, sum over the batch": lambda o, b: (o - b[1]).square().mean((1, 2)).sum(),
    "divided by the batch": lambda o, b: (o - b[1]).square().sum() / o.shape[0],
    "each sample divided by the batch": lambda o, b: ((o - b[1]).square() / o.shape[0]).sum(),
    "weighted terms": lambda o, b: 0.3 * (o - b[1]).abs().mean() + 0.7 * o.square().mean(0).sum() / 5,
    "labels": lambda o, b: F.cross_entropy(o.flatten(0, 1), labels(b).flatten()),
    "labels of classes in dim 1": lambda o, b: F.cross_entropy(o.transpose(1, 2), labels(b)),
    "labels summed": lambda o, b: F.cross_entropy(o.flatten(0, 1), labels(b).flatten(), reduction="sum"),
    "labels of each": lambda o, b: F.cross_entropy(o.flatten(0, 1), labels(b).flatten(), reduction="none").mean(),
    "steps before samples": steps_first,
    "binary": lambda o, b: F.binary_cross_entropy_with_logits(o, b[1].sigmoid()),
    "poisson": lambda o, b: F.poisson_nll_loss(o, b[1].abs()),
    "kl": lambda o, b: F.kl_div(o.log_softmax(-1), b[1].softmax(-1), reduction="batchmean"),
    "cosine": lambda o, b: 1 - F.cosine_similarity(o.flatten(1), b[1].flatten(1)).mean(),
    "triplet of one sample": lambda o, b: F.triplet_margin_loss(o.flatten(1), b[1].flatten(1), b[0].flatten(1)),
    "softmax over features": lambda o, b: (o.softmax(-1) * b[1]).mean(),
    "cumsum over steps": lambda o, b: (o.cumsum(1) * b[1]).mean(),
    "flip of steps": lambda o, b: (o.flip(1) * b[1]).mean(),
    "sorted features": lambda o, b: (o.sort(-1).values * b[1]).mean(),
    "standard deviation of a sample": lambda o, b: (o.std(1) * b[1][:, 0]).mean(),
    "layer norm": lambda o, b: (F.layer_norm(o, (WIDTH,)) * b[1]).mean(),
    "instance norm": lambda o, b: (F.instance_norm(o.transpose(1, 2)) * b[1].transpose(1, 2)).mean(),
    "batch norm with given statistics": lambda o, b: (
        F.batch_norm(o.flatten(1), torch.linspace(0, 1, 12).double(), torch.linspace(1, 2, 12).double(), training=False)
        .square()
        .mean()
    ),
    "two views": two_views,
    "index by position": picked,
    "attention": attended,
    "rolled steps": lambda o, b: (o.roll(1, 1) * b[1]).mean(),
    "a mask of steps": lambda o, b: (o * torch.ones(STEPS, STEPS).tril().sum(0)[:, None] * b[1]).mean(),
    "gram of each sample": lambda o, b: (o @ b[1].transpose(1, 2)).square().mean(),
    "weighed by a matrix of the batch": lambda o, b: (o.flatten(1).t() @ b[1].flatten(1)).sum(),
}
"""A batch's loss follows from its micro-batches."""

JOINED: dict[str, Loss] = {
    "contrastive": contrastive,
    "triplet": triplet,
    "ranking": ranking,
    "moments": moments,
    "a product of means": balance,
    "batch norm": norm_of_batch,
    "mean of the batch squared": lambda o, b: (o - b[1]).mean(0).square().sum(),
    "standard deviation": lambda o, b: o.std(0).mean(),
    "softmax over the batch": lambda o, b: (o.softmax(0) * b[1]).sum(),
    "cumsum over the batch": lambda o, b: (o.cumsum(0) * b[1]).mean(),
    "cumsum over rows": lambda o, b: (o.flatten(0, 1).cumsum(0) * b[1].flatten(0, 1)).mean(),
    "flip": lambda o, b: (o.flip(0) * b[1]).mean(),
    "rolled": lambda o, b: (o.roll(1, 0) * b[1]).mean(),
    "halves swapped": lambda o, b: (torch.cat(o.chunk(2)[::-1]) * b[1]).mean(),
    "half a batch apart": lambda o, b: (o.reshape(2, -1, STEPS, WIDTH).softmax(0).reshape(o.shape) * b[1]).mean(),
    "the first sample": lambda o, b: (o[:1] * b[1]).mean(),
    "the largest": lambda o, b: (o.amax(0) * b[1].mean(0)).sum(),
    "constants of samples": lambda o, b: (o * torch.linspace(1, 2, o.shape[0])[:, None, None]).mean(),
    "samples scaled before a bias": lambda o, b: F.linear(
        o / o.shape[0], torch.eye(WIDTH).double(), torch.linspace(0, 1, WIDTH).double()
    ).sum(),
    "a number of samples": lambda o, b: (o * o.shape[0]).tanh().mean(),
    "root": lambda o, b: F.mse_loss(o, b[1]).sqrt(),
    "masked mean": lambda o, b: (o * (b[1] > 0)).sum() / (b[1] > 0).sum(),
    "a mean and a sum": lambda o, b: o.mean() + b[1].sum() * o.sum(),
    "sum and a constant": lambda o, b: o.square().sum() + 1.0,
    "means of two kinds": lambda o, b: F.cross_entropy(o.flatten(0, 1), labels(b).flatten()) + o.square().mean(),
    "attention over samples": attended_over_samples,
    "class weights": lambda o, b: F.cross_entropy(
        o.flatten(0, 1), labels(b).flatten(), weight=torch.linspace(1, 2, WIDTH).double()
    ),
    "repeated mean": lambda o, b: (o.mean(0).expand(o.shape[0], -1, -1) * 1.0).sum() + o.mean(),
    "sorted samples": lambda o, b: (o.sort(0).values * b[1]).mean(),
    "one sample's place": lambda o, b: (o[b[1][:, 0, 0].argsort()] * b[1]).mean(),
    "batch to the power of two": lambda o, b: o.square().sum() * o.shape[0],
}
"""It does not."""
