"""Which alpha, bandwidth and launch explain the measured collectives? Least absolute relative error.

    seconds(group, nbytes) = launch + A(group) alpha + B(group) nbytes / bandwidth

A and B are what `cost_models.collectives` says of the library's algorithm on a link of alpha 1 and bandwidth 1, so the
fit is of the very formulas that planning uses. Where one line does not fit (caches, thresholds of allocators and of
protocols), message sizes are cut into ranges, at the same cuts on all levels: those with the least mean error, where a
further range counts as much as `WORTH` of it. Each range is a linear program (SciPy, HiGHS): absolute errors, unlike
squares, are not moved by a few bad measurements.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from autopar.calibration.samples import CollectiveSample
from autopar.cost_models.collectives import Form, algorithms, collective_seconds
from autopar.cost_models.links import axis_links
from autopar.errors import ClusterError
from autopar.report.units import nbytes_text
from autopar.values.cluster import Cluster
from autopar.values.device import Device
from autopar.values.link import Line, LinkLevel

WORTH = 0.02
MOST_RANGES = 5
LEAST_SIZES = 2
"""Message sizes in a range; from one alone no slope follows."""
LEAST_SECONDS_PER_BYTE = 1e-13
"""A line has a finite bandwidth, even where messages are too small to tell."""

Floats = npt.NDArray[np.float64]

Constants = tuple[float, float, float]
"""launch, alpha, seconds a byte"""
Levels = Sequence[tuple[int, str, Sequence[CollectiveSample]]]
"""Of each level its size, its scope and the samples of groups inside it."""


def fit_lines(kind: str, levels: Levels, library: str, members: int = 0) -> list[tuple[Line, ...]]:
    """Lines of every level, for a collective (or, kind "", for all that are sampled, with one set of constants).

    members: said of the lines; of the group size of all samples, or 0.
    """
    sizes = sorted({sample.nbytes for _, _, samples in levels for sample in samples})
    total = sum(len(samples) for _, _, samples in levels)

    @cache
    def fitted(first: int, last: int) -> tuple[tuple[Constants, ...], float]:
        """Constants of every level for the sizes from first to last, and the sum of errors."""
        found, errors = [], 0.0
        for size, scope, samples in levels:
            inside = [sample for sample in samples if sizes[first] <= sample.nbytes <= sizes[last]]
            constants, error = _fit_range(inside, size, scope, library)
            found.append(constants)
            errors += error
        return tuple(found), errors

    # The best way to cut sizes up to each, by the number of ranges.
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, -1): (0.0, ())}
    for count in range(1, MOST_RANGES + 1):
        for last in range(min(len(sizes), LEAST_SIZES) - 1, len(sizes)):
            options = [
                (best[count - 1, first - 1][0] + fitted(first, last)[1], (*best[count - 1, first - 1][1], first))
                for first in range(max(last + 2 - LEAST_SIZES, 1))
                if (count - 1, first - 1) in best
            ]
            if options:
                best[count, last] = min(options)
    complete = [(error / total + WORTH * count, starts) for (count, last), (error, starts) in best.items()
                if last == len(sizes) - 1 and count]  # fmt: skip
    starts = min(complete)[1]
    ends = [*(start - 1 for start in starts[1:]), len(sizes) - 1]
    cuts = [0.0, *(math.sqrt(sizes[start - 1] * sizes[start]) for start in starts[1:]), math.inf]
    ranges = [fitted(first, last)[0] for first, last in zip(starts, ends, strict=True)]
    return [
        tuple(_line(kind, members, cuts[k], cuts[k + 1], constants[level]) for k, constants in enumerate(ranges))
        for level in range(len(levels))
    ]


def fit_groups(
    kind: str, lines: Sequence[Line], level: tuple[int, str, Sequence[CollectiveSample]], library: str
) -> tuple[Line, ...]:
    """Lines of single group sizes of one level, where they err less than `lines` do by more than `WORTH`.

    More ranks than cores, or pairs with a link of their own: groups then differ by more than their numbers of hops.
    """
    size, scope, samples = level
    found: list[Line] = []
    for members in sorted({sample.group_size for sample in samples}):
        own = [sample for sample in samples if sample.group_size == members]
        [special] = fit_lines(kind, [(size, scope, own)], library, members)
        errors = [float(np.mean(_errors(each, own, size, scope, library))) for each in (lines, special)]
        if errors[0] - errors[1] > WORTH:
            found += special
    return tuple(found)


def _errors(
    lines: Sequence[Line], samples: Sequence[CollectiveSample], level_size: int, scope: str, library: str
) -> list[float]:
    unit = unit_cluster(level_size, scope, library, tuple(lines))
    groups = {n: axis_links(unit, (level_size // n, n), (1,)) for n in {sample.group_size for sample in samples}}
    return [abs(collective_seconds(s.kind, s.nbytes, groups[s.group_size])[0] / s.seconds - 1) for s in samples]


def _line(kind: str, members: int, above: float, up_to: float, constants: Constants) -> Line:
    launch, alpha, per_byte = constants
    protocol = f"above {nbytes_text(above)}" if up_to == math.inf else f"to {nbytes_text(up_to)}"
    return Line(
        launch=launch,
        alpha=alpha,
        bandwidth=1 / per_byte,
        kind=kind,
        members=members,
        protocol="" if (above, up_to) == (0.0, math.inf) else protocol,
        above=round(above),
        up_to=up_to if up_to == math.inf else round(up_to),
    )


def _fit_range(
    samples: Sequence[CollectiveSample], level_size: int, scope: str, library: str
) -> tuple[Constants, float]:
    """The best constants, and the sum of relative errors. Which algorithm ran is guessed, fitted and guessed again."""
    if not samples:
        return (0.0, 0.0, LEAST_SECONDS_PER_BYTE), 0.0
    seconds = np.array([sample.seconds for sample in samples])
    nbytes = np.array([float(sample.nbytes) for sample in samples])
    forms = [unit_forms(sample.kind, sample.group_size, level_size, scope, library) for sample in samples]
    chosen = [options[0] for options in forms]
    # Errors relative to the measurement alone would favour what is too low; the second pass is between both.
    scale = seconds
    for number in range(6):
        constants = _program(seconds, nbytes, chosen, scale)
        predicted = [
            [_seconds(form, size, constants) for form in options] for options, size in zip(forms, nbytes, strict=True)
        ]
        least = np.array([min(options) for options in predicted])
        cheapest = [options[int(np.argmin(own))] for options, own in zip(forms, predicted, strict=True)]
        if number and cheapest == chosen:
            break
        chosen, scale = cheapest, np.sqrt(seconds * np.maximum(least, 1e-3 * seconds))
    return constants, float(np.abs(least / seconds - 1).sum())


@lru_cache(maxsize=1024)
def unit_forms(kind: str, group_size: int, level_size: int, scope: str, library: str) -> tuple[Form, ...]:
    """Algorithms for groups of neighbours inside one level whose links have alpha 1 and bandwidth 1."""
    unit = unit_cluster(level_size, scope, library)
    return algorithms(kind, axis_links(unit, (level_size // group_size, group_size), (1,)))


def unit_cluster(level_size: int, scope: str, library: str, lines: tuple[Line, ...] = ()) -> Cluster:
    level = LinkLevel(name="unit", size=level_size, alpha=1.0, bandwidth=1.0, scope=scope, lines=lines)
    device = Device(
        name="unit", peak_flops=(), memory_bytes=1, memory_bandwidth=1.0, launch_seconds=0.0, efficiency=1.0
    )
    return Cluster(name="unit", device=device, levels=(level,), library=library)


def _program(seconds: Floats, nbytes: Floats, chosen: Sequence[Form], scale: Floats) -> Constants:
    """Constants with the least sum of |error| / scale."""
    count = len(seconds)
    alpha = np.array([form.alpha_seconds for form in chosen])
    beta = np.array([form.seconds_per_byte for form in chosen])
    coefficients = np.stack([np.ones(count), alpha, beta * nbytes], axis=1) / scale[:, None]
    # Units that make each unknown's largest coefficient 1, or unknowns would drown in the solver's tolerances.
    units = 1 / np.maximum(coefficients.max(axis=0), 1e-300)
    relative = coefficients * units
    slack = np.eye(count)
    answer = linprog(
        # Where launch and alpha do not differ (one group size), the time is alpha's.
        np.concatenate([[1e-6, 0.0, 0.0], np.full(count, 1 / count)]),
        A_ub=np.block([[relative, -slack], [-relative, -slack]]),
        b_ub=np.concatenate([seconds / scale, -seconds / scale]),
        bounds=[(0, None), (0, None), (LEAST_SECONDS_PER_BYTE / units[2], None), *[(0, None)] * count],
        method="highs",
    )
    if not answer.success:
        raise ClusterError(f"no line fits what was measured: {answer.message}; measure again")
    launch, per_hop, per_byte = np.maximum(answer.x[:3], 0.0) * units
    return float(launch), float(per_hop), float(max(per_byte, LEAST_SECONDS_PER_BYTE))


def _seconds(form: Form, nbytes: float, constants: Constants) -> float:
    launch, alpha, per_byte = constants
    return launch + form.alpha_seconds * alpha + form.seconds_per_byte * nbytes * per_byte
