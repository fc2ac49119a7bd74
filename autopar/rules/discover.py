"""What does running a call show? Values first in a process of its own, then gradients of what was seen to run.

Kernels that do not check the shapes of parts may end a process; that one is begun again without those parts. Autograd
runs in this process, as it may not be forked once it has run on a GPU.
"""

import warnings
from collections.abc import Sequence
from mmap import mmap

import torch

from autopar.rules.apart import run_apart
from autopar.rules.proof import Function
from autopar.rules.rule import Choice, Shapes
from autopar.rules.split_search import FoundSplits, RunsOtherwiseError, SplitSearch, TooLongError

CRASHES = 8
"""Of how many combinations of parts a kernel may end its process."""


def discover(
    function: Function, shapes: Shapes, results: Shapes, dtypes: Sequence[torch.dtype], graded: Sequence[bool]
) -> FoundSplits | None:
    """What a call of such operands allows; None where it does not run on the CPU, or not in the time it is given."""
    now, left_out = mmap(-1, 4), set[int]()
    while True:
        try:
            seen = run_apart(lambda: _seen_to_run(function, shapes, results, dtypes, frozenset(left_out), now))
            break
        except ChildProcessError:  # of parts that a kernel does not check: without them
            if len(left_out) == CRASHES or (number := int.from_bytes(now[:4], "little")) in left_out | {0}:
                return None
            left_out.add(number)
    if seen is None:
        return None
    wide, allowed = seen
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what random numbers make the call say
        try:
            return SplitSearch(function, shapes, results, dtypes, graded, wide).found(frozenset(allowed))
        except Exception:  # whatever its backward makes of them
            return None


def _seen_to_run(
    function: Function,
    shapes: Shapes,
    results: Shapes,
    dtypes: Sequence[torch.dtype],
    left_out: frozenset[int],
    now: mmap,
) -> tuple[bool, list[Choice]] | None:
    """Whether in float64, and the choices that hold for values, gradients aside; None where it cannot be tried."""
    for wide in (True, False):
        now[:4] = bytes(4)
        try:
            search = SplitSearch(function, shapes, results, dtypes, (False,) * len(shapes), wide)
            return wide, search.holding(left_out, now)
        except (TooLongError, RunsOtherwiseError):
            return None
        except Exception:  # whatever the call makes of other dtypes
            continue
    return None
