"""Which factors of each op run over the samples of the batch? What a data-parallel rank may have a part of.

Inputs have samples along their first dim (time-major ones along the second: where more work treats them one by one);
they travel through the factors of every rule, forwards and backwards. An op that mixes samples (a flip, a sort, a cat
of halves, one without a rule) runs whole; the dim of its result that has their size, a multiple, or alone another size,
has samples again.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.lower.program import Op, Program
from autopar.search.costs.pricing import Pricer
from autopar.values.graph import target_name

FEW = 4
"""How many times the batch an input may have along a dim of samples (pairs, triplets)."""

Place = tuple[str, int]
"""A tensor and one of its dims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFactors:
    """factors: by op, those that run over samples. mixing: ops that bring samples together without one. after: ops
    whose operands' samples were found again by their size. size: how many samples there are, 0 if no input has any."""

    factors: Mapping[str, frozenset[str]]
    mixing: frozenset[str]
    after: frozenset[str]
    size: int


def sample_factors(program: Program) -> SampleFactors:
    """Those of a program, found once."""
    if "sample factors" not in program.made:
        program.made["sample factors"] = _found(program)
    found: SampleFactors = program.made["sample factors"]
    return found


def _found(program: Program) -> SampleFactors:
    working = _working(program)
    best: tuple[int, SampleFactors] | None = None
    for dim in (0, 1) if _batch(program, 0) else ():
        if size := _batch(program, dim):
            flow = _Flow(program, size, _entries(program, size, dim))
            found, alone = flow.run(), sum(map(flow.is_alone, working))
            if best is None or alone > best[0]:
                best = alone, found
            if alone == len(working):
                break
    if best is None:
        nothing = frozenset[str]()
        return SampleFactors(factors={op.name: nothing for op in program.ops}, mixing=nothing, after=nothing, size=0)
    return best[1]


def _working(program: Program) -> list[Op]:
    """Trained ops that read parameters, or are products."""
    trained = (op for op in program.ops if any(op.result_grads))
    return [op for op in trained if op.parameters or op.rule.product is not None or op.rule.is_attention]


def _batch(program: Program, dim: int) -> int:
    """The size that most inputs have along a dim; of several one of numbers (not of indices), of which most other dims
    are a small multiple."""
    inputs = program.captured.inputs
    counts = Counter(s.shape[dim] for s in inputs if len(s.shape) > dim and s.shape[dim] > 1)
    alike = [n for n in counts if counts[n] == max(counts.values())]
    of_numbers = {s.shape[dim] for s in inputs if s.dtype.is_floating_point and len(s.shape) > max(dim, 1)}

    def fits(size: int) -> tuple[bool, int]:
        return size in of_numbers, sum(any(_is_few(other, size) for other in s.shape[:2]) for s in inputs)

    return max(alike, key=fits, default=0)


def _is_few(size: int, batch: int) -> bool:
    return size % batch == 0 and size <= FEW * batch


def _entries(program: Program, size: int, dim: int) -> Iterable[Place]:
    """Of each input the dim that has samples."""
    for spec in program.captured.inputs:
        first = (dim,) if dim < len(spec.shape) else ()
        for d in (*first, 0) if dim else first:
            if _is_few(spec.shape[d], size):
                yield spec.placeholder, d
                break


class _Flow:
    """`places`: dims of tensors that have samples; `found`: those that were found again by their size, or follow
    such."""

    def __init__(self, program: Program, size: int, entries: Iterable[Place]) -> None:
        self.program, self.size = program, size
        self.places = set(entries)
        self.again: set[str] = set()
        self.mixing: set[str] = set()
        self.factors: dict[str, frozenset[str]] = {}
        self.fixed = {n for n, t in program.tensors.items() if t.kind not in ("op", "input")}

    def run(self) -> SampleFactors:
        for op in self.program.ops:
            self._forward(op)
        before = len(self.places)
        for op in reversed(self.program.ops):
            self._backward(op)
        if len(self.places) > before:
            for op in self.program.ops:
                self._forward(op)
        return SampleFactors(
            factors=self.factors,
            mixing=frozenset(self.mixing),
            after=frozenset(op.name for op in self.program.ops if self.again & set(op.operands)),
            size=self.size,
        )

    def is_alone(self, op: Op) -> bool:
        """Whether the op treats samples one by one: one factor is theirs everywhere."""
        rows = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
        found = {dims[d] for name, dims in rows for d in range(len(dims)) if (name, d) in self.places}
        return len(found) == 1 and found <= self.factors[op.name]

    def _forward(self, op: Op) -> None:
        factors = self._factors_of(op, op.operands, op.rule.operands)
        rows = zip(op.operands, op.rule.operands, strict=True)
        entering = [(name, d) for name, dims in rows for d in range(len(dims)) if (name, d) in self.places]
        if not factors and entering:
            self.mixing.add(op.name)
            for name, shape in zip(op.results, op.result_shapes, strict=True):
                if name is not None and (d := self._found_again(op, entering, shape)) is not None:
                    self.places.add((name, d))
                    self.again.add(name)
        else:
            self.mixing.discard(op.name)
            if self.again & set(op.operands):
                self.again.update(r for r in op.results if r is not None)
        self.factors[op.name] = factors | self._factors_of(op, op.results, op.rule.results)
        self._place(op, op.results, op.rule.results)

    def _backward(self, op: Op) -> None:
        self.factors[op.name] |= self._factors_of(op, op.results, op.rule.results)
        self._place(op, op.operands, op.rule.operands)

    def _place(self, op: Op, names: Iterable[str | None], rows: Iterable[tuple[str | None, ...]]) -> None:
        for name, dims in zip(names, rows, strict=True):
            if name is not None and name not in self.fixed:
                self.places.update((name, d) for d, factor in enumerate(dims) if factor in self.factors[op.name])

    def _factors_of(
        self, op: Op, names: Iterable[str | None], rows: Iterable[tuple[str | None, ...]]
    ) -> frozenset[str]:
        """The factors of dims that have samples: none of a parameter's, which is the same for all."""
        own = {factor for i in op.parameters for factor in op.rule.operands[i]}
        return frozenset(
            factor
            for name, dims in zip(names, rows, strict=True)
            for d, factor in enumerate(dims)
            if factor is not None and (name, d) in self.places and factor not in own
        )

    def _found_again(self, op: Op, entering: list[Place], shape: tuple[int, ...]) -> int | None:
        """The dim of a result that has the samples: of as many, of a multiple, or the only one of another size; where
        an operand had them if that will do."""
        if math.prod(shape) * self.size <= max(math.prod(s) for s in op.operand_shapes):
            return None  # reduced over them
        read = [(tuple(self.program.tensors[name].shape), d) for name, d in entering]
        sizes, dims = {source[d] for source, d in read}, [d for d, size in enumerate(shape) if size > 1]
        rest = [at for s, at in read if (s[:at], s[at + 1 :]) == (shape[:at], shape[at + 1 :])]
        here = [at for _, at in read if at in dims and (shape[at] in sizes or at in rest)]
        alike = [d for d in dims if shape[d] in sizes]
        multiple = [d for d in dims if shape[d] % self.size == 0 and d <= max(at for _, at in read)]
        return next(iter(here + alike + multiple), None)


def splits_samples(op: Op, samples: SampleFactors, pricer: Pricer, axes: tuple[int, ...]) -> bool:
    """Whether an op's samples can be split over all these axes."""
    names = range(pricer.mesh.num_axes)
    return any(
        pricer.target.is_allowed(op, tuple(factor if axis in axes else "invariant" for axis in names))
        for factor in samples.factors[op.name]
    )


def check_samples(name: str, program: Program, samples: SampleFactors, pricer: Pricer, axes: tuple[int, ...]) -> None:
    """Raises InfeasibleError if no work is split by samples over these axes, with what in the model is in the way."""
    if not axes:
        return
    captured, n = program.captured, math.prod(pricer.mesh.shape[a] for a in axes)
    working = _working(program)
    having = [op for op in working if samples.factors[op.name]]
    if having and not any(splits_samples(op, samples, pricer, axes) for op in having):
        low = samples.size // n * n
        remedy = f"use {low} or {low + n}" if low else f"use {n}"
        raise InfeasibleError(
            f"{name} does not apply: global batch {samples.size} is not divisible by {n} data-parallel ranks; {remedy}"
        )
    if having or not working:
        return
    if not samples.size:
        shapes = ", ".join(f"{s.path} {tuple(s.shape)}" for s in captured.inputs) or "none"
        raise InfeasibleError(
            f"{name} does not apply: {captured.name} has no input with several samples along its first dim (inputs: "
            f"{shapes}); give it a batch of at least {n}"
        )
    mixing = next((op for op in program.ops if op.name in samples.mixing), working[0])
    what = f"{target_name(mixing.node.target)} of {' and '.join(map(str, mixing.operand_shapes))}"
    module = f" in {mixing.module}" if mixing.module else ""
    raise InfeasibleError(
        f"{name} does not apply: no call of {captured.name} that reads parameters has the {samples.size} samples "
        f"of the batch in one of its dims; the first that mixes them is {mixing.name} ({what}{module}): keep samples "
        "along one dim up to there"
    )
