"""Along which dims may a call be split that nobody wrote a rule for? It is run whole and in parts, and compared.

A dim of an operand is *aligned* with a dim of a result where other values in its first half change the result's first
half alone. Aligned dims make a factor if the call on parts gives the parts of the whole: results, and the gradients of
all operands (those of an operand that is not split are summed), for two ways of parting it. A backward pass that is not
linear in the gradient that arrives (a clipped gradient) may run on whole gradients or independent parts, never on
summands. Large operands are stood for by small ones if the call runs on them alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import operands, requires_grad
from autopar.ops.own_gradient import renewed
from autopar.rules.describe import free_dims, result_values, shapes_of
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Dims, Factor, Rule, Shapes, replicated_rule

SMALL, LARGE = 2**14, 2**22
"""Elements of operands up to which a call runs on its own shapes at once, and where nothing smaller runs."""
SCALES = (1e-4, 1e4)
Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Dims that are split together: of operands and of results by number, None for those that are not split.

    summed: results are the sum of those of the parts.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    summed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What running a call shows."""

    splits: tuple[Split, ...]
    linear_gradient: bool


_FOUND: dict[Any, Found | None] = {}


def discovered_rule(node: fx.Node) -> Rule:
    """The rule of a call node, from what running it shows; whole where it does not run here."""
    sources = operands(node)
    shapes, results = shapes_of(sources), tuple(tuple(v.shape) for v in result_values(node))
    dtypes = tuple(source.meta["val"].dtype for source in sources)
    grads = tuple(requires_grad(source) for source in sources)
    key = (node.target, node_constants(node), shapes, dtypes, grads)
    if key not in _FOUND:
        _FOUND[key] = discover(call_of(node), shapes, results, dtypes, grads)
    found = _FOUND[key]
    rule = replicated_rule(tuple(map(len, shapes)), tuple(map(len, results)))
    saves, saves_results, nbytes = _kept(node, rule)
    rule = replace(
        rule, saves=saves, saves_results=saves_results, saves_nbytes=nbytes, whole_gradient=requires_grad(node)
    )
    if found is None:
        return rule
    factors: dict[str, Factor] = {}
    dims, made = [[None] * len(s) for s in shapes], [[None] * len(s) for s in results]
    for number, split in enumerate(found.splits):
        name = f"dim{number}"
        for table, places in ((dims, split.operands), (made, split.results)):
            for row, place in zip(table, places, strict=True):
                if place is not None:
                    row[place] = name  # type: ignore[call-overload]
        first = next(i for i, place in enumerate(split.operands) if place is not None)
        size = shapes[first][split.operands[first]]  # type: ignore[index]
        factors[name] = Factor(size=size, summed=split.summed)
    return replace(
        rule,
        factors=factors,
        operands=tuple(_dims(row) for row in dims),
        results=tuple(_dims(row) for row in made),
        whole_gradient=requires_grad(node) and not found.linear_gradient,
        known=True,
    )


def _dims(row: Sequence[str | None]) -> Dims:
    return tuple(row)


def node_constants(node: fx.Node) -> str:
    """What a call is given beside tensors."""
    return str(fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: "tensor"))


def call_of(node: fx.Node) -> Call:
    """The node's call as a function of its tensor operands."""

    def call(*tensors: Tensor) -> Any:
        values = iter(tensors)
        given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: next(values))
        return node.target(*given[0], **given[1])  # type: ignore[operator]

    return call


def _kept(node: fx.Node, rule: Rule) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    try:
        return kept_by_autograd(node)
    except Exception:  # whatever the user's code makes of tensors without values
        return rule.saves, rule.saves_results, 0


def discover(
    call: Call, shapes: Shapes, results: Shapes, dtypes: Sequence[torch.dtype], grads: Sequence[bool]
) -> Found | None:
    """What splits a call allows; None where it does not run on the CPU. Splits are of dims, whatever their sizes."""
    for own, made in _stand_ins(shapes, results):
        for wide in (True, False):
            try:
                with torch.random.fork_rng(devices=[]):
                    return _Runs(call, own, made, dtypes, grads, wide).found()
            except Exception:
                continue
    return None


def _stand_ins(shapes: Shapes, results: Shapes) -> list[tuple[Shapes, Shapes]]:
    """Shapes to run on, in order: own ones if small, then with each size that is large exchanged for a small one."""
    numel = sum(math.prod(shape) for shape in shapes)
    sizes = sorted({n for shape in (*shapes, *results) for n in shape if n > 12})
    taken = {n for shape in (*shapes, *results) for n in shape}
    free = iter([n for n in range(4, 4 * (len(taken) + len(sizes)) + 8, 2) if n not in taken])
    small = {n: next(free) for n in sizes}

    def shrunk(of: Shapes) -> Shapes:
        return tuple(tuple(small.get(n, n) for n in shape) for shape in of)

    own, less = (shapes, results), (shrunk(shapes), shrunk(results))
    if numel <= SMALL:
        return [own]
    return [less, own] if numel <= LARGE else [less]


class _Runs:
    """Runs of a call on random operands of given shapes, in float64 if `wide`."""

    def __init__(
        self,
        call: Call,
        shapes: Shapes,
        results: Shapes,
        dtypes: Sequence[torch.dtype],
        grads: Sequence[bool],
        wide: bool,
    ) -> None:
        self.call, self.grads = call, grads
        self.generator = torch.Generator().manual_seed(0)
        self.wide = wide
        self.operands = [self._random(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        self.tolerance = 1e-9 if wide else 1e-3
        found = self._results(self.operands)
        if tuple(tuple(r.shape) for r in found) != tuple(results):
            raise ValueError("results of other shapes")
        self.gradients = [self._random(tuple(r.shape), r.dtype) if _is_float(r) else None for r in found]
        self.whole = self.run(self.operands, self.gradients)
        again = self.run(self.operands, self.gradients)
        if not all(map(self._equal, self.whole[0] + self.whole[1], again[0] + again[1])):
            raise ValueError("the call gives other values when it is made again")

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            made = torch.randn(shape, generator=self.generator, dtype=wide)
            return made if self.wide else made.to(dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5
        return torch.randint(0, 2, shape, generator=self.generator).to(dtype)

    def _results(self, given: Sequence[Tensor]) -> list[Tensor]:
        made = self.call(*given)
        return [made] if isinstance(made, Tensor) else list(made)

    def run(
        self, given: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Results, and gradients of operands: None for those that have none."""
        leaves = [
            value.detach().clone().requires_grad_(needs and _is_float(value))
            for value, needs in zip(given, self.grads, strict=True)
        ]
        with torch.enable_grad():
            results = self._results(leaves)
        ends = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad and g is not None]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not ends or not wanted:
            return [r.detach() for r in results], [None] * len(leaves)
        found = iter(torch.autograd.grad([r for r, _ in ends], wanted, [g for _, g in ends], allow_unused=True))
        return [r.detach() for r in results], [next(found) if leaf.requires_grad else None for leaf in leaves]

    def found(self) -> Found:
        """The splits that hold."""
        self.aligned = {
            (i, d): self._aligned(i, d) for i, x in enumerate(self.operands) for d in range(x.dim()) if x.shape[d] > 1
        }
        splits: list[Split] = []
        used: set[tuple[int, int]] = set()
        for place in self.aligned:
            if place in used:
                continue
            for split in self._candidates(*place):
                if self._holds(split):
                    splits.append(split)
                    used |= {(i, d) for i, d in enumerate(split.operands) if d is not None}
                    break
        return Found(splits=tuple(splits), linear_gradient=self._is_linear())

    def _aligned(self, operand: int, dim: int) -> tuple[list[int | None], list[int | None]]:
        """With which dim of each result, and of each operand's gradient, a dim of an operand is aligned: -1 where
        nothing there depends on the operand, None where more than a half does."""
        x = self.operands[operand]
        half = x.shape[dim] // 2
        other = x.clone()
        other.narrow(dim, 0, half).copy_(self._random(tuple(x.narrow(dim, 0, half).shape), x.dtype))
        given = [other if i == operand else value for i, value in enumerate(self.operands)]
        results, gradients = self.run(given, self.gradients)
        size = x.shape[dim]

        def along(before: Tensor | None, after: Tensor | None) -> int | None:
            if before is None or after is None:
                return -1
            changed = before != after
            if not bool(changed.any()):
                return -1
            dims = [
                e for e in range(changed.dim())
                if changed.shape[e] == size and not bool(changed.narrow(e, half, size - half).any())
            ]  # fmt: skip
            return (dim if dim in dims else dims[0]) if dims else None

        return (
            [along(b, a) for b, a in zip(self.whole[0], results, strict=True)],
            [along(b, a) for b, a in zip(self.whole[1], gradients, strict=True)],
        )

    def _candidates(self, operand: int, dim: int) -> list[Split]:
        """Splits that have this dim, likeliest first."""
        size = self.operands[operand].shape[dim]
        alike = [
            [d for d in range(x.dim()) if x.shape[d] == size] if i != operand else [dim]
            for i, x in enumerate(self.operands)
        ]
        results, _ = self.aligned[operand, dim]
        choices: list[list[int | None]] = []
        for i, dims in enumerate(alike):
            fits = [d for d in dims if i == operand or self._fits((operand, dim), (i, d))]
            choices.append([dim] if i == operand else [*sorted(fits, key=lambda d: d != dim), None])
        out = []
        for chosen in list(product(*choices))[:64]:
            made = list(results)
            for i, d in enumerate(chosen):
                if d is not None:
                    other = self.aligned[i, d][0]
                    made = [b if a == -1 else a for a, b in zip(made, other, strict=True)]
            if all(e is not None and e >= 0 for e in made):
                out.append(Split(operands=chosen, results=tuple(made)))
            elif all(e is None or e == -1 for e in made):
                out.append(Split(operands=chosen, results=(None,) * len(made), summed=True))
        return out

    def _fits(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether two dims may be split together, as far as what they are aligned with says."""
        pairs = zip(self.aligned[one][0], self.aligned[other][0], strict=True)
        return all(a == b or -1 in (a, b) for a, b in pairs)

    def _holds(self, split: Split) -> bool:
        """Whether parts of operands give parts of the results and gradients."""
        size = next(x.shape[d] for x, d in zip(self.operands, split.operands, strict=True) if d is not None)
        return all(self._holds_at(split, at) for at in {1, size // 2})

    def _holds_at(self, split: Split, at: int) -> bool:
        def parts(value: Any, dim: int | None) -> list[Any]:
            if dim is None or value is None:
                return [value, value]
            return [value.narrow(dim, 0, at), value.narrow(dim, at, value.shape[dim] - at)]

        given = [parts(x, d) for x, d in zip(self.operands, split.operands, strict=True)]
        arriving = [parts(g, d) for g, d in zip(self.gradients, split.results, strict=True)]
        try:
            runs = [self.run([p[k] for p in given], [g[k] for g in arriving]) for k in (0, 1)]
        except Exception:  # on other shapes it does not run
            return False

        def joined(one: Any, two: Any, dim: int | None) -> Any:
            if one is None or two is None:
                return one if two is None else two
            if dim is not None:
                return torch.cat([one, two], dim) if one.dim() == two.dim() else None
            return one + two if one.shape == two.shape else None

        results = [joined(a, b, d) for a, b, d in zip(runs[0][0], runs[1][0], split.results, strict=True)]
        gradients = [joined(a, b, d) for a, b, d in zip(runs[0][1], runs[1][1], split.operands, strict=True)]
        return all(map(self._equal, self.whole[0] + self.whole[1], results + gradients))

    def _is_linear(self) -> bool:
        """Whether gradients of operands are linear in those of results."""
        others = [None if g is None else self._random(tuple(g.shape), g.dtype) for g in self.gradients]
        both = [None if g is None or o is None else g + o for g, o in zip(self.gradients, others, strict=True)]
        first, second, summed = (self.run(self.operands, g)[1] for g in (self.gradients, others, both))
        added = [a if b is None else b if a is None else a + b for a, b in zip(first, second, strict=True)]
        if not all(map(self._equal, summed, added)):
            return False
        for scale in SCALES:
            scaled = self.run(self.operands, [None if g is None else g * scale for g in self.gradients])[1]
            if not all(map(self._equal, scaled, [None if g is None else g * scale for g in first])):
                return False
        return True

    def _equal(self, one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            rest = other if one is None else one
            return rest is None or not bool(rest.any())
        if one.shape != other.shape:
            return False
        if not _is_float(one):
            return torch.equal(one, other)
        scale = float(one.abs().max()) if one.numel() else 0.0
        close = torch.isclose(one, other, rtol=self.tolerance, atol=self.tolerance * scale, equal_nan=True)
        return bool(close.all())


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def renewed_rule(node: fx.Node) -> Rule:
    """`renewed(parameter, value)`: every dim by itself; the result is the value's storage."""
    factors, names = free_dims(tuple(node.meta["val"].shape), even=True)
    return Rule(factors=factors, operands=(names, names), results=(names,), alias=1)


RULES = {renewed: renewed_rule}
