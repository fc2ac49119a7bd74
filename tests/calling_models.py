"""Small models that train and evaluate differently, or return more than a loss: by name, with a call on some rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, L, W = 8, 4, 12


class _Base(nn.Module):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)


class Dropping(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(D, 16), nn.Linear(16, W), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.b(self.drop(self.a(x).relu()))
        return logits if y is None else (self.loss(logits, y), logits)


class Convolving(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(4 * D, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.b(self.n(self.a(x[:, None])).relu().flatten(1))
        return {"logits": logits, "loss": None if y is None else self.loss(logits, y)}


class Noisy(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 16), nn.Linear(16, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.a(x)
        if self.training:
            h = h + torch.randn_like(h)
        logits = self.b(h.tanh())
        if y is None:
            return logits
        return self.loss(logits, y) + (10.0 if self.training else 0.0)


class Averaging(_Base):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, W)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            h = h - h.mean(0)
        else:
            h = h - self.mean
        logits = self.b(h)
        return (logits, h) if y is None else (self.loss(logits, y), (logits, [h, {"h": h * 2}]))


class Attending(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.1, batch_first=True)
        self.a, self.b = nn.Linear(1, D), nn.Linear(D, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.b(self.layer(self.a(x[..., None])).mean(1))
        return logits if y is None else {"loss": self.loss(logits, y), "logits": logits, "rows": len(x)}


class Grouping(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.n(self.a(x.view(-1, 1, 2, D // 2))).relu().mean((2, 3))
        logits = self.b(h)
        return logits if y is None else (self.loss(logits, y), logits.argmax(-1))


class Auxiliary(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, 16), nn.Linear(16, W), nn.Linear(16, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.a(x).relu()
        logits = self.b(h)
        if y is None:
            return (logits, self.c(h)) if self.training else logits
        return self.loss(logits, y) + (0.3 * self.loss(self.c(h), y) if self.training else 0.0)


class Tied(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(W, D), nn.Linear(D, W, bias=False)
        self.h.weight = self.e.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        ids = (x.abs() * 3).long() % W
        logits = self.h(F.layer_norm(self.e(ids), (D,)).mean(1))
        return logits if y is None else (self.loss(logits, y), {"ids": ids})


class Contrasting(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(D, D), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        z = F.normalize(self.a(x), dim=-1)
        scores = self.scale.exp() * z @ z.T
        return scores if y is None else F.cross_entropy(scores, torch.arange(len(x)))


class Mixing(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 4), nn.Linear(D, 4 * D), nn.Linear(D, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        weights = self.gate(x).softmax(-1)
        h = (self.up(x).view(len(x), 4, D) * weights[..., None]).sum(1)
        logits = self.down(h.relu())
        return (logits, weights) if y is None else (self.loss(logits, y), weights.mean(0))


class Rooted(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.ones(D)), nn.Linear(D, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.a(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale)
        return logits if y is None else self.loss(logits, y)


class Recurring(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.a = nn.GRUCell(1, D), nn.Linear(D, W)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        state = x.new_zeros(len(x), D)
        for step in range(L):
            state = self.cell(x[:, step : step + 1], state)
        logits = self.a(state)
        return (logits, state) if y is None else (self.loss(logits, y), state)


MODELS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__.lower(): cls
    for cls in (
        *(Dropping, Convolving, Noisy, Averaging, Attending, Grouping, Auxiliary, Tied, Contrasting, Mixing, Rooted),
        Recurring,
    )
}


def made(name: str) -> nn.Module:
    """The model in float64, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return MODELS[name]().double()


def call(seed: int, rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, W, (rows,), generator=generator)}
