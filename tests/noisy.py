"""Models that draw random numbers in forward: every random op of torch, in groups, on one tensor `h` of 8 x 4."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as dist
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH = 8, 4
Function = Callable[[Tensor], Tensor]


def created(h: Tensor) -> Tensor:
    like = h.dtype
    h = h * torch.randn(ROWS, WIDTH, dtype=like) + torch.rand(ROWS, 1, dtype=like)
    h = h + torch.randint(5, (ROWS, WIDTH)) * torch.randint(2, 7, (WIDTH,))
    h = h + torch.normal(1.0, 2.0, (ROWS, WIDTH), dtype=like)
    return h[torch.randperm(ROWS)]


def alike(h: Tensor) -> Tensor:
    h = h * torch.randn_like(h) + torch.rand_like(h) + torch.randint_like(h, 7) + torch.randint_like(h, 3, 7)
    return h + (torch.randn_like(h.t()) * 2).t() + h.new_empty(WIDTH).uniform_(1, 2)


def filled(h: Tensor) -> Tensor:
    h = h * torch.empty_like(h).normal_(1, 2) + torch.empty_like(h).uniform_(-1, 2)
    h = h + torch.empty_like(h).exponential_(2.0) + torch.empty_like(h).geometric_(0.3)
    h = h + torch.empty_like(h).cauchy_().clamp(-3, 3) + torch.empty_like(h).log_normal_(0.1, 0.2)
    h = h + torch.empty_like(h).random_(5) + torch.empty_like(h).bernoulli_(0.3)
    return h + torch.empty_like(h.t()).normal_().t() + torch.empty_like(h).bernoulli_(h.sigmoid())


def sampled(h: Tensor) -> Tensor:
    out = h + torch.poisson(h.exp()) + torch.binomial(torch.full_like(h, 10), h.detach().sigmoid())
    out = out + torch.bernoulli(h.sigmoid()) + torch.normal(h, h.exp()) + torch.normal(h, 2.0)
    out = out + torch.normal(0.0, h.exp()) + h.gather(1, torch.multinomial(h.softmax(-1), 2)).sum(1, keepdim=True)
    out = out + h[torch.multinomial(h.softmax(-1)[:, 0], ROWS, replacement=True)]
    return out + torch._standard_gamma(h.exp()) + dist.Dirichlet(h.exp(), validate_args=False).rsample()


def distributed(h: Tensor) -> Tensor:
    h = h + dist.Normal(h, h.exp(), validate_args=False).rsample()
    one = dist.Categorical(logits=h, validate_args=False).sample()
    return h * one.unsqueeze(1) + F.gumbel_softmax(h, hard=True) + F.rrelu(h, training=True)


def dropped(h: Tensor) -> Tensor:
    image = F.dropout2d(F.dropout(h, 0.3).view(2, 4, 2, 2), 0.2)
    image = F.feature_alpha_dropout(F.dropout3d(image.view(2, 4, 2, 2, 1), 0.3), 0.3, True)
    line = F.dropout1d(image.reshape(2, 4, 4), 0.3)
    h = F.alpha_dropout(line.reshape(ROWS, WIDTH), 0.3, True)
    path = h.new_empty(ROWS, 1).bernoulli_(0.75).div_(0.75)
    square = h.new_empty(ROWS, WIDTH).bernoulli_(0.5).div_(0.5)
    return h * path + square * square + F.dropout(h.clone(), 0.4, inplace=True)


def attended(h: Tensor) -> Tensor:
    x = h.view(1, 2, 4, 4)
    return F.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), 0.2).view(ROWS, WIDTH) + torch.rand_like(h)


def unread(h: Tensor) -> Tensor:
    torch.randn_like(h), F.dropout(h, 0.3), torch.multinomial(h.softmax(-1), 1)
    return h * torch.rand_like(h)


FUNCTIONS: dict[str, Function] = {
    f.__name__: f for f in (created, alike, filled, sampled, distributed, dropped, attended, unread)
}


class Noisy(nn.Module):
    """Two linears with `function` between."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if name == "recurrent":
            self.layer = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        h = FUNCTIONS[self.name](h) if self.name in FUNCTIONS else self.layer(h.view(2, 4, WIDTH))[0].reshape(h.shape)
        return self.down(h).square().mean()


NAMES = (*FUNCTIONS, "recurrent")


def noisy(name: str) -> tuple[Noisy, dict[str, Tensor]]:
    """The model, the same in every process, and its input."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Noisy(name).double(), {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64) / 2}
