"""Small models whose forward asks for values: of constants, of buffers, in checks, of the world, of the data."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import distributions as law
from torch.nn import functional as F

Body = Callable[["Asking", Tensor, Tensor, Tensor], Tensor]
KNOWN: dict[str, Body] = {}
"""Bodies whose questions have answers that hold at every step, by name."""
CHECKS: dict[str, Body] = {}
"""Bodies that only check; each complains of NaN in x."""
REFUSED: dict[str, Body] = {}
"""Bodies that depend on the data; the line that does ends in its name."""


class Asking(nn.Module):
    """`body(self, x, self.linear(x), y)` is the loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("threshold", torch.tensor(0.7))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("lower", torch.tril(torch.ones(8, 8)).bool(), persistent=False)
        self.plain = torch.tensor([1.0, 2.0])
        self.body = [body]

    threshold: Tensor
    steps: Tensor
    lower: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body[0](self, x, self.linear(x), y)


def into(table: dict[str, Body]) -> Callable[[Body], Body]:
    def kept(body: Body) -> Body:
        table[body.__name__] = body
        return body

    return kept


@into(KNOWN)
def dims_as_a_list(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h.sum(torch.arange(1, 2).tolist()), y.sum(1))


@into(KNOWN)
def mask_of_constants(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    gram = (h.T @ h).clone()
    gram[torch.eye(8, dtype=torch.bool)] = 0.0
    apart = ~torch.eye(8, dtype=torch.bool)
    return gram[apart].pow(2).mean() + torch.masked_select(h, torch.arange(8) > 3).mean() + F.mse_loss(h, y)


@into(KNOWN)
def mask_of_a_buffer(model: Asking, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return (h.T @ h)[model.lower].mean() + F.mse_loss(h, y)


@into(KNOWN)
def places_of_constants(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    (even,) = torch.where(torch.arange(8) % 2 == 0)
    even += 1
    some = torch.unique(torch.tensor([3, 1, 1, 2]))
    twice = torch.repeat_interleave(h, torch.tensor([1, 2, 0, 1, 1, 1, 1, 1]), dim=1)
    return F.mse_loss(h[:, even], y[:, even]) * len(some) + h[:, some].mean() + twice.pow(2).mean()


@into(KNOWN)
def numbers_of_constants(model: Asking, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    n = torch.tensor(3)
    for i in range(n):
        h = h + i
    first = F.mse_loss(h[:, :n], y[:, :n]) + h[:, n].mean()
    return first * float(torch.ones_like(h).sum()) * (3 if model.plain.sum() > 2 else 1) * h.new_tensor([2.0]).item()


@into(KNOWN)
def written_through_views(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    grid = torch.zeros(4, 4)
    row = grid[1]
    row += 2
    grid.t()[0, 2].fill_(5)
    assert grid[1, 2] == 2 and grid[2, 0] == 5
    return F.mse_loss(h, y) * int(grid.sum())


@into(KNOWN)
def growing_times(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    times = torch.linspace(0, 1, 4)
    for before, after in itertools.pairwise(times):
        if (after - before).item() <= 0:
            raise ValueError("times grow")
        h = h + (after - before) * torch.tanh(h)
    return F.mse_loss(h, y)


@into(KNOWN)
def a_buffer_that_stays(model: Asking, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, y) * (3 if model.threshold > 0.5 else 1) * model.threshold.item()


@into(KNOWN)
def a_counter_as_a_tensor(model: Asking, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.steps += 1
    return F.mse_loss(h, y) * model.steps


@into(KNOWN)
def the_world(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, y) * (dist.get_world_size() if dist.is_initialized() else 1)


@into(KNOWN)
def told(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    print(f"mean {h.mean()} {h.mean():.3f} {h}")
    return F.mse_loss(h, y)


def finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


@into(CHECKS)
def raises(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("input is not finite")
    return F.mse_loss(h, y)


@into(CHECKS)
def asserts(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    assert -1e4 <= x.min() <= x.max() <= 1e4, "out of range"
    return F.mse_loss(h, y)


@into(CHECKS)
def counts(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    bad = torch.isnan(x).sum().item()
    if bad > 0:
        raise ValueError(f"{bad} are bad")
    return F.mse_loss(h, y)


@into(CHECKS)
def joins(model: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    if torch.isnan(x).any() and torch.isnan(h).any() and model.training:
        raise ValueError("both")
    if not ((y < 1e4).all() and not (y < -1e4).any()):
        raise ValueError("labels")
    return F.mse_loss(h, y)


@into(CHECKS)
def calls_a_function(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    ok = finite(x)
    if not ok:
        raise ValueError("input is not finite")
    return F.mse_loss(h, y)


@into(CHECKS)
def calls_torch(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    torch._assert(torch.isfinite(x).all(), "finite")
    return F.mse_loss(h, y)


@into(CHECKS)
def compares_a_number(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    assert int(torch.isnan(x).sum()) == 0
    return F.mse_loss(h, y)


@into(CHECKS)
def normal(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return -law.Normal(h, F.softplus(h) + 1e-3).log_prob(y).mean()


@into(CHECKS)
def beta(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return -law.Beta(F.softplus(h) + 0.1, F.softplus(-h) + 0.1).log_prob(y.sigmoid()).mean()


@into(CHECKS)
def categorical(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return -law.Categorical(logits=h).log_prob(y.argmax(-1)).mean()


@into(CHECKS)
def multivariate(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    joint = law.MultivariateNormal(h, scale_tril=torch.eye(8, dtype=h.dtype))
    divergence = law.kl_divergence(law.Normal(h, 1.0), law.Normal(torch.zeros_like(h), torch.ones_like(h)))
    return divergence.mean() - joint.log_prob(y).mean() - law.Independent(law.Normal(h, 1.0), 1).log_prob(y).mean()


@into(CHECKS)
def gaussian(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    if torch.isnan(x).any():
        raise ValueError("nan")
    return F.gaussian_nll_loss(h, y, F.softplus(h) + 0.1)


@into(KNOWN)
def numbers_that_are_computed_with(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    level = x.mean()
    number = level.item()
    level.mul_(3)  # the number is what the tensor was
    f"{h.mean().item():.3f}"
    return (h * number).clamp(max=x.max().item()).square().sum() / (y > 0).sum().item() + F.mse_loss(h, y)


@into(REFUSED)
def branch(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, y) * (2 if h.sum() > 0 else 1)  # branch


@into(REFUSED)
def loop(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    while h.abs().max() > 1:  # loop
        h = h / 2
    return F.mse_loss(h, y)


@into(REFUSED)
def number(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, y) * len(range(int(x.abs().sum())))  # number


@into(REFUSED)
def array(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, y) * float(x.detach().numpy().mean())  # array


@into(REFUSED)
def selection(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h[x > 0], y[x > 0])  # selection


@into(REFUSED)
def random_numbers(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    drawn = torch.zeros(3).uniform_()
    return F.mse_loss(h, y) * (2 if drawn.sum() > 0.5 else 1)  # random_numbers


@into(REFUSED)
def tainted(_: Asking, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    grid = torch.zeros(8, 8)
    flat = grid.view(-1)
    grid[0] = h.mean(0)
    return F.mse_loss(h, y) * (2 if flat.sum() > 0 else 1)  # tainted


@into(REFUSED)
def counter(model: Asking, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.steps += 1
    return F.mse_loss(h, y) * (3 if model.steps < 5 else 1)  # counter


@into(REFUSED)
def caught(_: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    try:
        if torch.isnan(x).any():  # caught
            raise ValueError("nan")
    except ValueError:
        h = h * 0
    return F.mse_loss(h, y)


@into(REFUSED)
def returns_or_raises(model: Asking, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    if torch.isnan(x).any():  # returns_or_raises
        if model.training:
            return h.sum() * 0
        raise ValueError("nan")
    return F.mse_loss(h, y)
