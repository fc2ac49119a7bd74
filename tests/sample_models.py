"""Small models whose batch passes through in every way but the plainest: what data parallelism has to cope with."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, T, D = 8, 6, 4

Forward = Callable[["Parts", Tensor, Tensor], Tensor]


class Parts(nn.Module):
    """What the forward of a case is made of."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.body = forward
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D, track_running_stats=False)
        self.counted = nn.BatchNorm1d(D)
        self.attention = nn.MultiheadAttention(D, 2)
        self.unread = nn.Parameter(torch.randn(7))
        self.token = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self, x, y)


def _error(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y)


def _contrast(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    one, two = F.normalize(parts.first(x), dim=-1), F.normalize(parts.second(y), dim=-1)
    scores = one @ two.t() / 0.1
    labels = torch.arange(x.shape[0])
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


def _pairs(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    both = parts.second(F.relu(parts.first(torch.cat([x, y]))))
    one, two = both.chunk(2)
    return (one - two.detach()).square().sum(-1).mean()


def _windows(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    cut = x.view(-1, T // 2, 2, D).reshape(-1, 2, D)
    out = parts.second(F.softmax(parts.first(cut) @ cut.transpose(1, 2), -1) @ cut)
    return _error(out.view(-1, T // 2, 2, D).reshape(-1, T, D), y)


def _heads_outermost(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    heads = parts.first(x).view(-1, T, 2, D // 2).permute(2, 0, 1, 3).reshape(-1, T, D // 2)
    out = F.softmax(heads @ heads.transpose(1, 2), -1) @ heads
    return _error(parts.second(out.view(2, -1, T, D // 2).permute(1, 2, 0, 3).reshape(-1, T, D)), y)


def _barlow(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    one, two = parts.norm(parts.first(x)), parts.norm(parts.second(y))
    return (one.t() @ two / x.shape[0] - torch.eye(D, dtype=x.dtype)).square().sum()


def _time_major(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    out, _ = parts.attention(x, x, x, need_weights=False)
    return _error(parts.second(F.relu(parts.first(out))), y)


def _token(parts: Parts, x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([parts.first(parts.token.expand(x.shape[0], 1, D)), x], 1)
    return _error(parts.second(F.relu(joined))[:, 1:], y)


ROWS: dict[str, Forward] = {
    "plain": lambda p, x, y: _error(p.second(F.relu(p.first(x))), y),
    "flip": lambda p, x, y: _error(p.second(F.relu(p.first(x).flip(0))), y),
    "roll": lambda p, x, y: _error(p.second(F.relu(p.first(x).roll(1, 0))), y),
    "sort": lambda p, x, y: _error(p.second(p.first(x).sort(0).values), y),
    "chunk and cat": lambda p, x, y: _error(p.second(torch.cat(p.first(x).chunk(2)[::-1])), y),
    "chunk and cat of inputs": lambda p, x, y: _error(p.first(torch.cat(x.chunk(2)[::-1])), y),
    "rows by index": lambda p, x, y: _error(p.second(p.first(x)[torch.arange(x.shape[0] - 1, -1, -1)]), y),
    "repeated rows": lambda p, x, y: _error(p.second(p.first(x).repeat_interleave(3, 0)), y.repeat_interleave(3, 0)),
    "tiled rows": lambda p, x, y: _error(p.second(p.first(x).repeat(3, 1)), y.repeat(3, 1)),
    "mean over rows": lambda p, x, y: _error(p.second((h := p.first(x)) - h.mean(0)), y),
    "largest of rows": lambda p, x, y: _error(p.second((h := p.first(x)) / h.amax(0, keepdim=True)), y),
    "norm over rows": lambda p, x, y: _error(p.second((h := p.first(x)) / h.norm()), y),
    "variance over rows": lambda p, x, y: _error(p.second(h := p.first(x)), y) + (1 - h.std(0)).relu().mean(),
    "rows summed before": lambda p, x, y: p.second(F.relu(p.first(x)).sum(0)).square().sum() + y.mean(),
    "cumulative rows": lambda p, x, y: _error(p.second(p.first(x).cumsum(0)), y),
    "shifted rows": lambda p, x, y: _error(p.second(h := p.first(x))[1:] - h[:-1], y[1:]),
    "best rows": lambda p, x, y: p.second(p.first(x)).sub(y).square().mean(1).topk(5, 0).values.mean(),
    "batch norm": lambda p, x, y: _error(p.second(p.counted(p.first(x))), y),
    "batch norm, no statistics": lambda p, x, y: _error(p.second(p.norm(p.first(x))), y),
    "sum of losses": lambda p, x, y: F.mse_loss(p.first(x), y, reduction="sum"),
    "unreduced loss": lambda p, x, y: F.smooth_l1_loss(p.first(x), y, reduction="none").sum(1).max(),
    "rows with rows": _contrast,
    "pairs of rows": _pairs,
    "columns with columns": _barlow,
    "no rule": lambda p, x, y: _error(
        p.second(torch.special.i1e(p.first(x)).kthvalue(1, 1, keepdim=True).values * x), y
    ),
    "distances of rows": lambda p, x, y: torch.cdist(p.first(x), p.second(y)).diagonal().mean(),
}
"""By kind, of x and y (batch, features)."""

BLOCKS: dict[str, Forward] = {
    "windows": _windows,
    "heads outermost": _heads_outermost,
    "a learned token": _token,
    "rows of all samples": lambda p, x, y: _error(p.second(F.relu(p.first(x.reshape(-1, D)))), y.reshape(-1, D)),
    "rows of all samples, normed": lambda p, x, y: _error(p.counted(p.first(x.reshape(-1, D))), y.reshape(-1, D)),
    "turned in between": lambda p, x, y: _error(p.second(p.first(x.transpose(0, 1)).flip(0)).transpose(0, 1), y),
}
"""Of x and y (batch, sequence, features)."""

STEPS: dict[str, Forward] = {
    "time-major": _time_major,
}
"""Of x and y (sequence, batch, features)."""

CASES = (*ROWS, *BLOCKS, *STEPS)


def sample_model(case: str, batch: int = B) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """A model in float64 and its inputs."""
    torch.manual_seed(0)
    shape = (batch, D) if case in ROWS else (batch, T, D) if case in BLOCKS else (T, batch, D)
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name in ("x", "y")}
    return Parts({**ROWS, **BLOCKS, **STEPS}[case]).double(), inputs
