"""Along which dims may a call be split? It is run whole and in parts, and compared (`proof.holds`).

Other values in the first half of an operand's dim change the first half of a result's dim alone where the two may be
split together: those are candidates. One is a split if parts give the whole on values of several kinds, for two ways
of parting it; then once more at the own sizes of the split dims, the others small. Sums over a dim are summed results.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from autopar.rules.example_operands import DOMAINS, NARROW, Domain, elements, other_values, small_shapes, values
from autopar.rules.proof import Function, ProofRun, equal, holds, is_float, run, tensors_of
from autopar.rules.rule import Choice, Shapes
from autopar.values.placement import PARTIAL, REPLICATE, Placement, Shard

ELEMENTS = 3 * 2**24
"""Of operands and results of all runs together, which take about two seconds; a call that needs more runs whole."""
RUNS = 40
"""How many runs there must be elements for, or the call is not tried."""
MANY = 2**18
"""Elements of results of two runs, on more than which no values of a third kind are tried."""
LARGEST = 2**17
"""Elements of operands on which a split is tried at its own sizes; on more, at the largest sizes that have no more."""
COMBINATIONS, LINEAR = 128, 4
"""How many combinations of dims are tried, and of how many operands all sets are tried to be linear together."""
EXACT, ROUNDED = 1e-9, 1e-5
"""Tolerances in float64, and where a call computes in float32 whatever it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSplits:
    """What running a call shows.

    splits: choices that hold, one a factor. linear: sets of operands in which it is linear together.
    linear_gradient: whether gradients of operands are linear in those of results.
    """

    splits: tuple[Choice, ...]
    linear: tuple[frozenset[int], ...]
    linear_gradient: bool


class TooLongError(Exception):
    """A call was run on more than `ELEMENTS` elements."""


class RunsOtherwiseError(Exception):
    """A call gives other values on equal operands, or writes them."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call that counts what it is run on."""

    function: Function
    left: int = ELEMENTS

    def __call__(self, *operands: Tensor) -> Any:
        self.left -= sum(x.numel() for x in operands)
        if self.left < 0:
            raise TooLongError
        made = self.function(*operands)
        self.left -= sum(x.numel() for x in tensors_of(made))
        return made


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype


class SplitSearch:
    """Trials of a call on small shapes, and what follows from them."""

    def __init__(
        self,
        function: Function,
        shapes: Shapes,
        results: Shapes,
        dtypes: Sequence[torch.dtype],
        graded: Sequence[bool],
        wide: bool,
    ) -> None:
        self.call, self.shapes, self.results = _Call(function=function), shapes, results
        self.dtypes, self.graded = [_widened(d) for d in dtypes] if wide else dtypes, graded
        self.small = small_shapes(function, shapes, results, self.dtypes)
        if elements(self.small) * RUNS > ELEMENTS:
            raise TooLongError
        self.generator = torch.Generator().manual_seed(0)
        self.trials = self._trials()
        self.domain, self.below, first = self.trials[0]
        self._must_be_pure(first)
        self.tolerance = self._tolerance(first)
        self.floats = tuple(i for i, x in enumerate(first.operands) if x.is_floating_point())
        self.summable = tuple(r.is_floating_point() for r in first.results)
        places = [(i, d) for i, s in enumerate(self.small) for d, n in enumerate(s) if n > 1]
        self.aligned = {place: self._aligned(*place) for place in places}

    def _trials(self) -> list[tuple[Domain, int, ProofRun]]:
        """Runs on values of each kind that the call is finite on: two at least."""
        found: list[tuple[Domain, int, ProofRun]] = []
        shapes: Shapes = ()
        for number, domain in enumerate((*DOMAINS, *NARROW)):
            if found and (number >= len(DOMAINS) or (len(found) > 1 and elements(shapes) > MANY)):
                break
            try:
                found += [t for t in [self._trial(domain, self.small)] if t is not None]
                shapes = tuple(tuple(r.shape) for _, _, whole in found for r in whole.results)
            except (TooLongError, RunsOtherwiseError):
                raise
            except Exception as error:  # perhaps not values that it is defined on
                failed = error
        if not found:
            raise failed
        return found if len(found) > 1 else [*found, self._trial(found[0][0], self.small) or found[0]]

    def _trial(self, domain: Domain, shapes: Shapes) -> tuple[Domain, int, ProofRun] | None:
        places = min((n for s, d in zip(shapes, self.dtypes, strict=True) if d.is_floating_point for n in s), default=2)
        for below in sorted({max(places, 2), 2}, reverse=True):
            try:
                whole = self._run(domain, below, shapes)
            except TooLongError:
                raise
            except Exception:  # not places in what they index
                if below == 2:
                    raise
                continue
            is_finite = all(bool(x.isfinite().all()) for x in whole.made() if x is not None)
            return (domain, below, whole) if is_finite else None
        return None

    def _run(self, domain: Domain, below: int, shapes: Shapes) -> ProofRun:
        given = [values(s, d, domain, below, self.generator) for s, d in zip(shapes, self.dtypes, strict=True)]
        made = tensors_of(self.call(*[x.clone() for x in given]))
        if [r.dim() for r in made] != [*map(len, self.results)]:
            raise RunsOtherwiseError
        arriving = [
            values(tuple(r.shape), r.dtype, DOMAINS[0], 2, self.generator) if is_float(r) else None for r in made
        ]
        return run(self.call, given, self.graded, arriving)

    def _must_be_pure(self, whole: ProofRun) -> None:
        """Equal values on equal operands, wherever in memory they are, and none written."""
        leaves = [x.clone() for x in whole.operands]
        with torch.no_grad():
            self.call(*leaves)
        again = run(self.call, whole.operands, self.graded, whole.arriving)
        moved = [x.mT.contiguous().mT if x.dim() > 1 else x for x in whole.operands]
        alike = all(torch.equal(a, b) for a, b in zip(leaves, whole.operands, strict=True))
        try:
            elsewhere = run(self.call, moved, self.graded, whole.arriving)
        except RuntimeError:  # a view that asks for contiguous memory
            elsewhere = again
        for other in (again, elsewhere):
            alike = alike and all(equal(a, b, 1e-6) for a, b in zip(whole.made(), other.made(), strict=True))
        if not alike:
            raise RunsOtherwiseError

    def _tolerance(self, whole: ProofRun) -> float:
        """What parts may differ from the whole by rounding."""
        if any(d not in (torch.float64, torch.complex128) for d in self.dtypes if d.is_floating_point or d.is_complex):
            return 20 * max(torch.finfo(d).eps for d in self.dtypes if d.is_floating_point or d.is_complex)
        nearby = [x * (1 + 1e-12) if is_float(x) else x for x in whole.operands]
        results = run(self.call, nearby, self.graded, whole.arriving).results
        same = all(torch.equal(a, b) for a, b in zip(whole.results, results, strict=True) if is_float(a))
        return ROUNDED if same else EXACT

    def holding(self, left_out: frozenset[int], now: mmap) -> list[Choice]:
        """Candidates that hold on the first of the values.

        left_out: numbers of those that are not tried. now: where the number of the one that is being tried is written.
        """
        first = self.trials[0][2]
        candidates = dict.fromkeys(c for place in self.aligned for c in self._candidates(*place, set()))
        found: list[Choice] = []
        for number, choice in enumerate(candidates, start=1):
            if number not in left_out:
                now[:4] = number.to_bytes(4, "little")
                found += [choice for at in self._ways(choice)[-1:] if self._holds(first, choice, at)]
        return found

    def found(self, allowed: frozenset[Choice]) -> FoundSplits:
        """What holds on all of them; of choices, only those allowed are tried."""
        splits: list[Choice] = []
        used: set[tuple[int, int]] = set()
        for place in self.aligned:
            tried = filter(allowed.__contains__, self._candidates(*place, used))
            if place not in used and (split := next(filter(self._is_split, tried), None)):
                splits.append(split)
                used |= {(i, p.dim) for i, p in enumerate(split.operands) if isinstance(p, Shard)}
        return FoundSplits(splits=tuple(splits), linear=self._linear(), linear_gradient=self._has_linear_gradient())

    def _aligned(self, operand: int, dim: int) -> tuple[frozenset[int] | None, ...]:
        """With which dims of each result a dim of an operand may be split; None where nothing there depends on it."""
        whole = self.trials[0][2]
        x = whole.operands[operand]
        size = x.shape[dim]
        first = Fraction(size // 2, size)
        other = x.clone()
        part = other.narrow(dim, 0, size // 2)
        part.copy_(other_values(part, self.domain, self.below, self.generator))
        given = [other if i == operand else value for i, value in enumerate(whole.operands)]
        try:
            results = tensors_of(self.call(*given))
        except TooLongError:
            raise
        except Exception:  # not values that it is defined on
            return tuple(frozenset(range(r.dim())) for r in whole.results)

        def along(before: Tensor, after: Tensor) -> frozenset[int] | None:
            changed = before != after
            if not bool(changed.any()):
                return None
            ends = {e: first * n for e, n in enumerate(changed.shape) if _fits(n, size)}
            return frozenset(
                e
                for e, end in ends.items()
                if end.denominator == 1 and not bool(changed.narrow(e, int(end), changed.shape[e] - int(end)).any())
            )

        return tuple(along(b, a) for b, a in zip(whole.results, results, strict=True))

    def _candidates(self, operand: int, dim: int, used: set[tuple[int, int]]) -> Iterator[Choice]:
        """Choices that split this dim, likeliest first."""
        size = self.small[operand][dim]
        dims: list[list[int | None]] = []
        for i, shape in enumerate(self.small):
            free = [d for d, n in enumerate(shape) if _fits(n, size) and (i, d) not in used]
            fits = [d for d in free if self._together((operand, dim), (i, d))]
            dims.append([dim] if i == operand else [*sorted(fits, key=lambda d: (shape[d] != size, d != dim)), None])
        for number, chosen in enumerate(product(*dims)):
            if number == COMBINATIONS:
                return
            yield from self._choices(chosen, size, dim)

    def _choices(self, chosen: Sequence[int | None], size: int, dim: int) -> Iterator[Choice]:
        """Choices that split operands so: what is known of results says how those are split, or that they are sums."""
        rows = [self.aligned[i, d] for i, d in enumerate(chosen) if d is not None]
        places: list[list[Placement]] = []
        for r, value in enumerate(self.trials[0][2].results):
            known = [row[r] for row in rows if row[r] is not None]
            if known:
                at = frozenset.intersection(*known)  # type: ignore[arg-type]
            else:
                at = frozenset(e for e, n in enumerate(value.shape) if n == size)
            ends: list[Placement] = [Shard(e) for e in sorted(at, key=lambda e: e != dim)]
            places.append([*ends[:2], PARTIAL] if self.summable[r] else list(ends[:2]))
        depends = any(found is not None for row in rows for found in row)
        whole = [i for i in self.floats if chosen[i] is None]
        for results in product(*places):
            added: list[tuple[int, ...]] = [()]
            if PARTIAL in results:
                if not depends:
                    continue
                added += [(i,) for i in whole] + ([tuple(whole)] if len(whole) > 1 else [])
            for summands in added:
                operands = tuple(
                    Shard(d) if d is not None else PARTIAL if i in summands else REPLICATE for i, d in enumerate(chosen)
                )
                yield Choice(name="split", operands=operands, results=results)

    def _together(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether two dims may be split together, as far as what they are aligned with says."""
        pairs = zip(self.aligned.get(one, ()), self.aligned.get(other, ()), strict=False)
        return all(a is None or b is None or a == b or a & b for a, b in pairs)

    def _is_split(self, choice: Choice) -> bool:
        own = split_size(choice, self.shapes, self.results)
        first = self.trials[0][2]
        small = split_size(choice, self.small, tuple(tuple(r.shape) for r in first.results))
        made = tuple(tuple(r.shape) for r in first.results)
        if min(own, small) < 2 or ratios(choice, self.shapes, self.results) != ratios(choice, self.small, made):
            return False
        if not all(self._holds(whole, choice, at) for _, _, whole in self.trials for at in self._ways(choice)):
            return False
        return self.small == self.shapes or self._holds_at_own_size(choice, own)

    def _ways(self, choice: Choice) -> list[Fraction]:
        """Where dims are cut on small shapes: after one part of those it can have, and in the middle."""
        size = split_size(choice, self.small, tuple(tuple(r.shape) for r in self.trials[0][2].results))
        return [Fraction(k, size) for k in sorted({1, size // 2})] if size > 1 else []

    def _holds(self, whole: ProofRun, choice: Choice, at: Fraction) -> bool:
        if self.call.left < 0:
            raise TooLongError
        return holds(self.call, whole, choice, at, self.tolerance, self.generator)

    def _holds_at_own_size(self, choice: Choice, own: int) -> bool:
        made = tuple(tuple(r.shape) for r in self.trials[0][2].results)
        small = split_size(choice, self.small, made)

        def grown(shapes: Shapes, placements: Sequence[Placement]) -> Shapes:
            return tuple(
                tuple(n // small * own if p == Shard(d) else n for d, n in enumerate(shape))
                for shape, p in zip(shapes, placements, strict=True)
            )

        while own > small:
            shapes = grown(self.small, choice.operands)
            if elements(shapes) + elements(grown(made, choice.results)) <= LARGEST:
                break
            own //= 2
        else:
            return True
        for given in (shapes, self.shapes):
            if elements(given) > LARGEST or (given == self.shapes and elements(self.results) > LARGEST):
                return False
            try:
                trials = [self._trial(domain, given) for domain in dict.fromkeys(d for d, _, _ in self.trials)]
            except TooLongError:
                raise
            except Exception:  # other dims must have this size too
                continue
            return all(t is None or self._holds_alike(t[2], choice) for t in trials) and any(trials)
        return False

    def _holds_alike(self, whole: ProofRun, choice: Choice) -> bool:
        """Whether a split holds on a run on larger operands, its dims having sizes of the ratios that they have."""
        shapes, made = (tuple(tuple(x.shape) for x in tensors) for tensors in (whole.operands, whole.results))
        size = split_size(choice, shapes, made)
        is_alike = ratios(choice, shapes, made) == ratios(choice, self.shapes, self.results)
        return is_alike and all(self._holds(whole, choice, Fraction(k, size)) for k in sorted({1, size // 2}))

    def _linear(self) -> tuple[frozenset[int], ...]:
        """The smallest sets of operands that may be summands, results being so. Of what results do not depend on,
        perhaps on these values alone, nothing is shown."""
        floats = [i for i in self.floats if self._matters(i)]
        if not all(self.summable):
            return ()
        sizes = range(1, len(floats) + 1) if len(floats) <= LINEAR else (1, len(floats))
        found: list[frozenset[int]] = []
        for chosen in (frozenset(s) for n in sizes for s in combinations(floats, n)):
            if any(known <= chosen for known in found):
                continue
            operands = tuple(PARTIAL if i in chosen else REPLICATE for i in range(len(self.small)))
            choice = Choice(name="partial", operands=operands, results=(PARTIAL,) * len(self.results))
            if all(self._holds(whole, choice, Fraction(1, 2)) for _, _, whole in self.trials):
                found.append(chosen)
        return tuple(found)

    def _matters(self, operand: int) -> bool:
        """Whether other values of an operand change a result, on all kinds of values."""
        for domain, below, whole in self.trials:
            other = other_values(whole.operands[operand], domain, below, self.generator)
            given = [other if i == operand else value for i, value in enumerate(whole.operands)]
            if all(map(torch.equal, tensors_of(self.call(*given)), whole.results)):
                return False
        return True

    def _has_linear_gradient(self) -> bool:
        count = len(self.small), len(self.results)
        choice = Choice(name="replicate", operands=(REPLICATE,) * count[0], results=(REPLICATE,) * count[1])
        whole = self.trials[0][2]
        return all(self._holds(whole, choice, Fraction(1, 2)) for _ in range(5))


def _fits(one: int, other: int) -> bool:
    """Whether one of two sizes is a multiple of the other."""
    return one > 1 and (one % other == 0 or other % one == 0)


def split_size(choice: Choice, shapes: Shapes, results: Shapes) -> int:
    """Into how many parts a choice can split at the most: the largest number that divides all of its dims."""
    return math.gcd(*_split_sizes(choice, shapes, results))


def ratios(choice: Choice, shapes: Shapes, results: Shapes) -> list[int]:
    """How often that goes into each of those dims."""
    size = split_size(choice, shapes, results)
    return [n // size for n in _split_sizes(choice, shapes, results)]


def _split_sizes(choice: Choice, shapes: Shapes, results: Shapes) -> list[int]:
    placed = zip((*choice.operands, *choice.results), (*shapes, *results), strict=True)
    return [shape[p.dim] for p, shape in placed if isinstance(p, Shard)]
