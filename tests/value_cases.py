"""Bodies at whose shapes, dtypes and arguments a rewrite of `passes.normalize` could change values, by its file.

A case is a function and what it is called with: random parameters by shape, or tensors that are given.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Case = tuple[Callable[..., Any], tuple[Any, ...]]

DOUBLE, SINGLE, COMPLEX = torch.float64, torch.float32, torch.complex128
COUNT = torch.arange(12).reshape(3, 4)
TOKENS = torch.tensor([[-1, 0], [4, -5]])
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
HEADS = ((2, 4, 6, 3), (2, 2, 6, 3), (2, 2, 6, 3))


def written(target: Tensor, place: Any, value: Any) -> Tensor:
    target[place] = value
    return target


def strided_write(target: Tensor, value: Tensor) -> Tensor:
    target.as_strided((2, 2), (5, 1), 1).copy_(value)
    return target


def complex_of(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=COMPLEX, requires_grad=True, generator=torch.Generator().manual_seed(0))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Two heads of keys and values, as wide a group of queries to each."""
    return F.scaled_dot_product_attention(query, repeated(key), repeated(value), mask, **options)


def filled(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def repeated(x: Tensor) -> Tensor:
    """Heads as grouped attention repeats them."""
    batch, groups, length, width = x.shape
    return x[:, :, None].expand(batch, groups, 2, length, width).reshape(batch, 2 * groups, length, width)


CASES: dict[str, dict[str, Case]] = {
    "drop_noops": {
        "a pad of equal shape": (lambda w: F.pad(w, (1, -1)), ((3, 4),)),
        "a pad that crops": (lambda w: F.pad(w, (-1, -1, 2, 0), value=1.5), ((3, 4),)),
        "no pad": (lambda w: F.pad(w, (0, 0)), ((3, 4),)),
        "nothing added": (lambda w: [w + 0, w - 0.0, w * 1, w / 1, 0 - w, 1 / w, 0 + w], ((3,),)),
        "nothing added to integers": (lambda w, x: [(x + 0) * w, (x / 1) * w, (x > 1) * 1 * w], ((3, 4), COUNT)),
        "casts": (lambda w, x: [w.to(SINGLE) * 2, x.type_as(w), w.long() * w, w.to(COMPLEX)], ((3, 4), COUNT)),
        "repeats": (lambda w: [w.repeat(1, 1, 2), w.repeat(1, 1), w.tile(2), w.expand(2, 1, 3)], ((1, 3),)),
        "one of a list": (lambda w: torch.cat([w], -1), ((3, 4),)),
        "nothing left": (
            lambda w: [w[:0].sum(0), torch.cat([w[:0], w]), w[:0].reshape(0, 2, 2).flatten(1).t()],
            ((3, 4),),
        ),
    },
    "canonical_arguments": {
        "a vector against a matrix": (lambda q, w: F.cosine_similarity(q, w, dim=-1), ((4,), (4, 4))),
        "dims of both": (lambda q, w: F.cosine_similarity(q, w, dim=0), ((4,), (4, 4))),
        "products along a dim": (lambda q, w: torch.linalg.vecdot(q, w, dim=-2), ((3, 3), (3, 3, 3))),
        "a new dim": (
            lambda q, w: [torch.stack([q, w], -1), torch.stack([q, w], -2), q.unsqueeze(-1)],
            ((3, 2), (3, 2)),
        ),
        "a diagonal": (lambda w: [torch.diag_embed(w, 1, -1, 0), torch.diag_embed(w, -1, -2, -1)], ((3, 2),)),
        "of a diagonal": (lambda w: torch.diagonal(w, 1, -1, -3), ((3, 4, 5),)),
        "an empty operand": (lambda w: torch.cat([filled(0), w, w * 2], -1)[:, :4], ((3, 4),)),
        "all dims as -1": (lambda v, g: torch._weight_norm(v, g, -1), ((3, 4), (1,))),
        "reductions": (
            lambda w: [w.sum((-1, 0)), w.amax((0, -1)), w.std(-1), w.var(0, correction=0), w.sum([])],
            ((3, 4),),
        ),
        "dtypes of sums": (lambda w, x: [w.sum(-1, dtype=SINGLE), x.cumsum(-1, dtype=DOUBLE) * w], ((3, 4), COUNT)),
        "no dims": (lambda w: [w.softmax(-1), w.cumsum(0), w.sum(-1), w.unsqueeze(-1)], ((),)),
    },
    "creation": {
        "rows from the end": (lambda t, i: [t[i], t[i.int()]], ((5, 3), TOKENS)),
        "rows by constants": (lambda t: t[torch.arange(3)[:, None] - torch.arange(3)], ((5, 3),)),
        "complex rows": (lambda t, i: t[i], (complex_of(5, 3), TOKENS)),
        "pads": (lambda w, x: [F.pad(w, (1, 0), value=0.5), F.pad(x, (1, 1), value=3) * w.sum()], ((3, 4), COUNT)),
        "a pad of flags": (lambda w, x: F.pad(x > 3, (1, 1), value=True) * w.sum(), ((3, 4), COUNT)),
        "a pad of complex": (lambda w: F.pad(w, (1, 0), value=0.5), (complex_of(3),)),
        "other pads": (
            lambda w: [F.pad(w, (2, 1), mode=m) for m in ("reflect", "replicate", "circular")],
            ((2, 3, 4),),
        ),
        "values of their own": (lambda w, x: [torch.full_like(x, 2.7) * w, x.new_full((4,), 7) * w], ((3, 4), COUNT)),
        "complex values": (lambda w: torch.full((4,), 1 + 2j, dtype=COMPLEX) * torch.ones_like(w), ((3, 4),)),
        "values written": (lambda w: [(w * 2).zero_(), (w * 2).fill_(3), w.conj().clone().zero_()], (complex_of(3),)),
        "copies": (lambda w: [filled(3, 4).copy_(w[0]), filled(3, 4, dtype=torch.int32).copy_(9 * w) * w], ((3, 4),)),
    },
    "slices": {
        "from the end": (lambda w: [w.narrow(-1, -3, 2), w.select(-2, -1), w[:, -4:-1:2], w[-9:2]], ((3, 5),)),
        "parts": (lambda w: [*w.chunk(3, -1), *w.tensor_split((1, -1), -1), *w.split([0, 2, 3], -1)], ((3, 5),)),
        "one part": (lambda w: w.unbind(-2), ((1, 5),)),
        "written": (lambda w, x: torch.slice_scatter(x, w, 0, -2, 9), ((2, 4), (3, 4))),
        "nothing written": (lambda w, x: torch.slice_scatter(x, w[:0], 0, 3, 1), ((2, 4), (4, 4))),
        "written in steps": (lambda w, x: torch.slice_scatter(x, w, 0, 0, 4, 2), ((2, 4), (4, 4))),
        "written in another dtype": (lambda w, x: torch.slice_scatter(w.detach(), x, 0, 1, 3) / w, ((3, 4), COUNT[:2])),
        "a row written": (lambda w, x: torch.select_scatter(x, w, -1, -2), ((4,), (4, 3))),
        "rounded as written": (
            lambda w: written(filled(4, 3, dtype=torch.int32), (slice(None), 1), 5 * w) * w.sum(),
            ((4,),),
        ),
        "a piece promoted": (lambda w, x: torch.cat([x, w], 0)[:3] / 2, ((2, 4), COUNT)),
    },
    "constants": {
        "reordered, then grouped": (
            lambda w: w * torch.arange(12.0).view(4, 3).t().contiguous().view(2, 6)[:, :1],
            ((2, 4),),
        ),
        "looked up": (
            lambda w: w * torch.arange(12.0).view(3, 4).t()[torch.tensor([-1, 2, 0]), torch.tensor([-1, 1, 0])],
            ((2, 3),),
        ),
        "looked up along one dim": (
            lambda w: w * torch.zeros(3, 4).add(torch.arange(4.0))[:, torch.tensor([-1, 2, 0])],
            ((3, 3),),
        ),
        "running sums": (lambda w: [w * torch.tensor(3.0).cumsum(0), w * torch.ones(3, 4).cumsum(-1)], ((3, 4),)),
        "differences": (
            lambda w: w * torch.diff(torch.arange(12.0).view(3, 4) ** 2, prepend=torch.ones(3, 1)),
            ((3, 4),),
        ),
        "bits": (lambda w: w * torch.ones(1, 4).expand(3, 4).contiguous().view(torch.int32), ((3, 4),)),
        "pairs": (lambda w: w * torch.view_as_complex(torch.ones(3, 4, 2)).real, ((3, 4),)),
        "written by place": (
            lambda w: written(filled(3, 4), (slice(None), torch.tensor([-1, 0])), w[:, :2]),
            ((3, 4),),
        ),
        "nothing but constants": (lambda w: [torch.arange(4), torch.linspace(0, 1, 5), torch.arange(3) * 2], ((3, 4),)),
    },
    "where": {
        "always": (lambda w: torch.where(torch.ones(3, 1, dtype=torch.bool), w, filled()), ((1, 4),)),
        "never": (lambda w, x: torch.where(torch.zeros(1, dtype=torch.bool), w, x) + w.sum(), ((3, 4), COUNT)),
        "promoted": (lambda w, x: torch.where(torch.ones(1, dtype=torch.bool), x, w) / 3 + w, ((3, 4), COUNT)),
        "a mask of more dims": (lambda w: w.masked_fill(torch.zeros(3, 1, dtype=torch.bool), 1.0), ((1, 4),)),
    },
    "views": {
        "orders": (
            lambda w: [w.movedim((0, -1), (-1, 1)), w.swapaxes(-1, 0), w.mT, w[0].t(), w[0, 0].t()],
            ((2, 3, 4),),
        ),
        "conjugates": (lambda w: [w.mH, w.adjoint(), w.conj().imag], (complex_of(2, 3, 4),)),
        "sizes": (
            lambda w: [w.unflatten(-1, (-1, 2)), w.flatten(-2), w[:, :1].squeeze(-2), w.view_as(w[:])],
            ((2, 3, 4),),
        ),
        "broadcast": (lambda w, x: torch.broadcast_tensors(w, x), ((3, 1), (2, 1, 4))),
    },
    "storage": {
        "strides of a copy": (lambda w: w.t().contiguous().as_strided((2, 3), (5, 1), 1), ((3, 4),)),
        "strides of a permutation": (lambda w: (w * 2).t().as_strided((3, 2, 2), (4, 1, 1)), ((3, 4),)),
        "strides of a part": (lambda w: (w * 2)[1:].as_strided((2, 2), (2, 1), 5), ((3, 4),)),
        "strides written": (lambda w, x: strided_write(w * 2, x), ((3, 4), (2, 2))),
        "bits of a permutation": (lambda w: w.float().t().contiguous().view(torch.int32) * 1e-9 * w.sum(), ((3, 4),)),
        "pairs of a permutation": (lambda w: torch.view_as_complex(w.permute(1, 2, 0).contiguous()), ((2, 3, 4),)),
        "parts of a conjugate": (
            lambda w: torch.view_as_real(w.conj().clone().resolve_conj()),
            (complex_of(3),),
        ),
    },
    "linear": {
        "one bias for all": (lambda x, w, b: F.linear(x, w, b), ((2, 3, 4), (5, 4), (1,))),
        "one bias for all, in parts": (lambda x, w, b: F.linear(x, w, b).split([2, 4], -1), ((3, 4), (6, 4), (1,))),
        "a bias a row": (lambda x, w, b: torch.addmm(b, x, w), ((2, 4), (4, 5), (2, 1))),
        "scaled": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2), ((2, 4), (4, 5), (5,))),
        "of vectors": (lambda x, w: [x @ w, w.t() @ x, F.linear(w.t(), x)], ((4,), (4, 5))),
        "square": (lambda x, w: x @ w.t() @ w, ((4, 4), (4, 4))),
        "flattened": (lambda x, w: (x.reshape(6, 4) @ w).view(2, 3, 5), ((2, 3, 4), (4, 5))),
        "integers": (lambda w, x: (x @ x.t()) * w, ((3, 3), COUNT)),
    },
    "sink_expands": {
        "a number promotes": (lambda t, x: (t.expand(4) + x.float()).sin(), ((), COUNT)),
        "a number compared": (lambda t, x: ((0 * t + 0.1).expand(3) > x) * t, ((), torch.full((3,), 0.1))),
        "ranks": (lambda t, x: (t.expand(2, 3) * x.expand(2, 3)).sin(), ((3,), (1, 1))),
        "rows": (lambda t: F.embedding(torch.arange(3).expand(2, 3), t), ((5, 3),)),
        "rows by how often they are read": (
            lambda t, x: F.embedding(x[None].expand(2, 3), t, scale_grad_by_freq=True),
            ((5, 3), torch.tensor([1, 1, 2])),
        ),
    },
    "attention": {
        "causal": (lambda q, k, v: attend(q, k, v, CAUSAL), HEADS),
        "shifted": (lambda q, k, v: attend(q, k, v, CAUSAL.roll(1, 1).tril(2)), HEADS),
        "added": (
            lambda q, k, v: attend(q, k, v, filled(6, 6).masked_fill(~CAUSAL, -1e30)),
            HEADS,
        ),
        "rows that see nothing": (
            lambda q, k, v, mask: [attend(q, k, v, mask), attend(q, k, v, mask[:1, None, None])],
            (*HEADS, CAUSAL.tril(-1)),
        ),
        "fewer queries": (lambda q, k, v: attend(q[:, :, :3], k, v, CAUSAL[:3]), HEADS),
        "one head of queries": (lambda q, k, v: attend(q[:, :1], k, v), HEADS),
        "scaled": (lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3), HEADS),
    },
    "batch_norm": {
        "of given statistics": (
            lambda w, x: F.batch_norm(w, x, x + 2, training=False),
            ((3, 4), torch.ones(4, dtype=DOUBLE)),
        ),
        "without statistics": (lambda w: F.batch_norm(w, None, None, training=True), ((3, 4, 2),)),
    },
}

LABELS = torch.tensor([1, 0, 2])
SIGNS = torch.tensor([1.0, -1.0, 1.0], dtype=DOUBLE)


def losses(reduction: str) -> dict[str, Case]:
    """Losses of torch under one reduction; the mean is every op's default, and not its binding's."""
    r: dict[str, Any] = {"reduction": reduction}
    return {
        "mse": (lambda x, y: F.mse_loss(x, y.expand(3, 4), **r), ((3, 4), (1, 4))),
        "l1": (lambda x, y: F.l1_loss(x, y, **r), ((3, 4), (3, 4))),
        "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5, **r), ((3, 4), (3, 4))),
        "huber": (lambda x, y: F.huber_loss(x, y, delta=0.5, **r), ((3, 4), (3, 4))),
        "soft margin": (lambda x, y: F.soft_margin_loss(x, y, **r), ((3,), SIGNS)),
        "binary": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), **r), ((3, 4), (3, 4))),
        "binary of logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **r), ((3, 4), (3, 4))),
        "weighed": (
            lambda x, y: F.cross_entropy(x, y, weight=torch.arange(1.0, 5, dtype=DOUBLE), **r),
            ((3, 4), LABELS),
        ),
        "smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, ignore_index=2, **r), ((3, 4), LABELS)),
        "classes second": (lambda x, y: F.cross_entropy(x, y.expand(2, 3), **r), ((2, 4, 3), LABELS)),
        "of one row": (lambda x, y: F.cross_entropy(x, y[0], **r), ((4,), LABELS)),
        "soft labels": (lambda x: F.cross_entropy(x, x.softmax(-1), label_smoothing=0.1, **r), ((3, 4),)),
        "divergence": (lambda x, y: F.kl_div(x, y, log_target=True, **r), ((3, 4), (3, 4))),
        "counts": (lambda x, y: F.poisson_nll_loss(x, y, **r), ((3, 4), (3, 4))),
        "hinge": (lambda x, y: F.hinge_embedding_loss(x, y, **r), ((3,), SIGNS)),
        "cosine": (lambda x, y, z: F.cosine_embedding_loss(x, y, z, **r), ((3, 4), (3, 4), SIGNS)),
        "triplets": (lambda x, y: F.triplet_margin_loss(x, y, y.flip(0), **r), ((3, 4), (3, 4))),
        "ranks": (lambda x, y, z: F.margin_ranking_loss(x, y, z, **r), ((3,), (3,), SIGNS)),
        "margins": (lambda x, y: F.multi_margin_loss(x, y, **r), ((3, 4), LABELS)),
    }


CASES |= {f"losses, {reduction}": losses(reduction) for reduction in ("mean", "sum", "none")}
