"""Small models that ask for numbers: to note them, to compute with them, to give them to calls, to branch on them."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributions as law
from torch.nn import functional as F

Body = Callable[["Noting", Tensor, Tensor, Tensor], Tensor]
KEPT: dict[str, Body] = {}
"""Bodies whose graph is the module's, by name."""
REFUSED: dict[str, Body] = {}
"""Bodies whose outputs depend on an answer, or on what the call before left behind."""


class Meter:
    """An average that is read by people."""

    def __init__(self) -> None:
        self.total = self.mean = 0.0
        self.count = 0

    def update(self, value: Any, n: int = 1) -> None:
        if torch.is_tensor(value):
            value = value.item()
        self.total += value * n
        self.count += n
        self.mean = self.total / self.count


class Noting(nn.Module):
    """`body(self, x, self.linear(x), y)` is the loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("seen", torch.zeros(()))
        self.body = [body]
        self.meter, self.notes, self.recent = Meter(), list[Any](), deque[Any](maxlen=3)
        self.table: dict[str, Any] = {}
        self.last, self.best, self.bad, self.lowest = 0.0, math.inf, 0, None
        self.is_high = False

    lowest: Any
    seen: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body[0](self, x, self.linear(x), y)


def into(table: dict[str, Body]) -> Callable[[Body], Body]:
    def kept(body: Body) -> Body:
        table[body.__name__] = body
        return body

    return kept


@into(KEPT)
def notes_numbers(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    model.last = float(loss.detach())
    model.table["mean"] = float(h.detach().mean().cpu())
    model.table["count"] = int((h > 0).sum())
    model.notes.append(round(loss.item(), 2))
    model.meter.update(loss, h.shape[0])
    model.meter.update(float(loss.detach()))
    return loss


@into(KEPT)
def writes_text(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    print("loss %.3f of %d" % (loss.item(), int((h > 0).sum())), f"{float(loss.detach()):.2f}")  # noqa: UP031
    print("{:.1f}".format(loss.item()) + "%.1f" % h.detach().mean())  # noqa: UP031, UP032
    return loss


@into(KEPT)
def notes_lists(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.notes += h.argmax(-1).tolist()
    model.table["rows"] = h.mean(0).tolist()[:2]
    return F.mse_loss(h, y)


@into(KEPT)
def counts_what_is_used(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.table["used"] = len(torch.unique(h.argmax(1)))
    model.table["positive"] = torch.nonzero(h > 0).shape[0]
    return F.mse_loss(h, y)


@into(KEPT)
def keeps_the_best(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    if loss.item() < model.best:
        model.best = loss.item()
    else:
        model.bad += 1
    return loss


@into(KEPT)
def computes_with_numbers(_: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    level = float(y.var())
    count = max((y > 0).sum().item(), 1)
    terms = math.exp(-level) + math.log(1 + level) + math.pow(level, 0.3) + math.floor(10 * level) + abs(-level)
    terms += round(7 * level) + int(3 * level) + min(level, 0.5) + math.sqrt(count / 7) + math.log(level + 2, 3)
    return F.mse_loss(h / math.sqrt(y.pow(2).mean().item()), y) * terms + h.sum() / count + count // 3 * x.mean()


@into(KEPT)
def numbers_are_values(_: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    total = y.mean().item()
    first = total
    total += y.std().item()  # first is what it was
    count = (y > 0).sum().item()
    half = count
    half //= 2
    kind = 2 if isinstance(total, float) and isinstance(count, int) and not isinstance(total, Tensor) else 3
    return F.mse_loss(h, y) * first + h.mean() * total * kind + h.std() * (half / count)


@into(KEPT)
def a_number_leaves_dtypes_alone(_: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    level = y.abs().mean().item()
    single = (h.float().mean() * level).dtype == torch.float32 and (torch.arange(3) * level).dtype == torch.float32
    double = ((y > 0).sum().item() / 3 * torch.ones((), dtype=torch.float64)).dtype == torch.float64
    return F.mse_loss(h, y) * (2 if single and double else 1)


@into(KEPT)
def the_larger_loss(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    one, other = F.mse_loss(h, y), F.l1_loss(h, y)
    return one / max(other.detach(), 1e-3) + max(one, other) + min(one, 0.3)


@into(KEPT)
def numbers_as_arguments(_: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    v = y.abs().mean().item()
    h = h + torch.full((8,), v) + torch.full_like(h, v) + h.new_full((8, 8), v) + torch.tensor(v) + h.new_tensor(v)
    h = torch.add(h, y, alpha=v).clamp(min=-abs(v), max=2.5).masked_fill(y > 1, v)
    h = torch.sub(h, x, alpha=v).addcmul(x, y, value=v) + F.leaky_relu(h, v) + torch.lerp(h, y, v)
    return F.mse_loss(h, y) + torch.tensor([v, 1.0, 2 * v], dtype=h.dtype).sum() * h.mean() + h.abs().pow(v).mean()


@into(REFUSED)
def the_average_of_the_last(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    model.recent.append(loss.item())
    model.table["recent"] = sum(model.recent) / len(model.recent)
    return loss


@into(REFUSED)
def text_that_is_kept(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.notes.append(f"{h.mean().item():.1f}")
    return F.mse_loss(h, y)


@into(REFUSED)
def arrays_are_computed_with(_: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    a = y.cpu().numpy()
    w = np.clip(np.abs(a - a.mean()) / (a.std() + 1e-6), 0, 2).astype(np.float64)
    scale = np.exp(-y.var().item()) + np.mean([y[i].mean().item() for i in range(3)]) + np.sum(a > 0) / len(a)
    kept = torch.from_numpy(w.sum(0)).type_as(x) + torch.as_tensor(np.sqrt(w)).to(x)
    return F.mse_loss(h * torch.tensor(w, dtype=x.dtype) + kept, y) * scale * w.shape[1]


@into(KEPT)
def a_cumulative_average(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model.norm(h), y)


@into(KEPT)
def counts_of_classes(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    labels = y.argmax(1)
    counts = torch.bincount(labels, minlength=8) + torch.bincount(labels, weights=y[:, 0], minlength=8)
    return (F.mse_loss(h, y, reduction="none").mean(1) * counts[labels]).mean()


@into(KEPT)
def moves_a_module(model: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model.linear.to(x.device)(h), y)


@into(KEPT)
def what_returns_itself_without_gradients(model: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        same = h.to(x.device), h.contiguous(), h.type_as(x), h.cpu(), torch.as_tensor(h), model.linear.weight.to(x)
        other = h.float()
    return F.mse_loss(h, y) + sum(t.pow(2).mean() for t in same) + other.double().pow(2).mean() * h.mean()


@into(KEPT)
def a_covariance_is_checked(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    mean = h.mean(0)
    matrix = torch.eye(8, dtype=h.dtype) + 0.1 * mean[:, None] * mean
    one = law.MultivariateNormal(h, covariance_matrix=matrix)
    other = law.MultivariateNormal(y, precision_matrix=matrix)
    return law.kl_divergence(one, other).mean() - one.log_prob(y).mean()


@into(KEPT)
def one_hot_of_the_first_classes(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    places = (y > 0).cumsum(0)
    kept = F.one_hot(places, max(places.max() + 1, 4))[..., :4]
    return (h[..., None] * kept).pow(2).mean() + F.mse_loss(h, y)


@into(REFUSED)
def one_hot_of_all_classes(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    places = (y > 0).cumsum(0)
    return F.one_hot(places, max(places.max() + 1, 4)).sum() * h.mean() + F.mse_loss(h, y)


@into(REFUSED)
def casts_a_module(model: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model.linear.float()(h.float()).double(), y)


@into(REFUSED)
def between(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h * 2 if 0.3 < float(y.abs().mean()) < 0.7 else h, y)


@into(REFUSED)
def both_of_two(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h * 2 if y.mean() > 0 and y.std() > 1 else h, y)


@into(REFUSED)
def writes_a_buffer(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    if loss.item() < 1.3:
        model.seen += 1
    return loss


@into(REFUSED)
def a_flag_for_the_next_call(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h * 2 if model.is_high else h, y)
    if loss.item() > 0.1:
        model.is_high = True
    return loss


@into(REFUSED)
def a_count_for_later_calls(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h * 2 if model.bad > 1 else h, y)
    if loss.item() > 0.1:
        model.bad += 1
    return loss


@into(REFUSED)
def an_average_that_decides(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h * 2 if model.last > 5 else h, y)
    model.last = 0.9 * model.last + 10.1 * loss.item()
    return loss


@into(REFUSED)
def the_loss_before(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y) * (1 + model.last)
    model.last = float(loss.detach())
    return loss


@into(REFUSED)
def a_moving_average(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.last = 0.9 * model.last + 0.1 * y.mean().item()
    return F.mse_loss(h, y) * model.last


@into(REFUSED)
def a_test_of_the_loss_before(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y) * (2 + (model.last > 0.5))
    model.last = loss.item()
    return loss


@into(REFUSED)
def the_list_before(model: Noting, _: Tensor, h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y) * (model.notes[-1] if model.notes else 1)
    model.notes.append(round(loss.item(), 3))
    return loss


@into(REFUSED)
def repeats_as_often(_: Noting, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    for _ in range(int(x.abs().sum())):
        h = h * 0.9
    return F.mse_loss(h, y)


@into(REFUSED)
def until_it_is_small(_: Noting, __: Tensor, h: Tensor, y: Tensor) -> Tensor:
    while not bool((h.abs() < 1).all()):
        h = h * 0.5
    return F.mse_loss(h, y)
