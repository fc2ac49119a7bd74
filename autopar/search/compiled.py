"""How is a kernel of the search compiled: by Numba, cached on disk, without the interpreter's lock, `/` as in NumPy.

Numba's cache knows when a kernel's own file changes, not when one that it calls does; so the cache lies in a folder
named by a hash of all kernels' sources, in the first of `AUTOPAR_CACHE`, `NUMBA_CACHE_DIR`, `XDG_CACHE_HOME` and
~/.cache that can be written. Where none can, kernels are compiled in every process anew, and a warning says so.

Kernels are iterative (recursive ones with a cache crashed) and use no generator of their own: whoever calls passes a
`state`, one uint64, so that a seed decides everything (splitmix64: Steele, Lea, Flood, OOPSLA 2014).
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

State = NDArray[np.uint64]

PLACES = ("AUTOPAR_CACHE", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
"""Variables that may name the folder."""


@cache
def cache_folder() -> str | None:
    """Where compiled kernels of these very sources lie; None where no folder can be written."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        if b"@compiled" in (source := file.read_bytes()):
            digest.update(source)
    named = [os.environ.get(name) for name in PLACES]
    for base in [*filter(None, named), "~/.cache"]:
        try:
            folder = Path(base).expanduser() / "autopar" / f"kernels-{digest.hexdigest()[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, RuntimeError):  # read-only, or nobody's home
            continue
        return str(folder)
    warnings.warn(
        "no folder for compiled kernels of the search can be written, so that every process compiles them anew, which "
        f"takes about a minute; name one that can be with {PLACES[0]}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A kernel of whole loops."""
    config: Any = numba.config
    before, folder = config.CACHE_DIR, cache_folder()
    config.CACHE_DIR = folder or ""  # read when a function is decorated
    try:
        kernel = numba.njit(cache=folder is not None, nogil=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
    return cast(Callable[P, R], kernel)


def seeded(seed: int) -> State:
    """The state that a seed stands for."""
    return np.array([(seed * 0x9E3779B97F4A7C15 + 0x1234567) % 2**64], np.uint64)


@compiled
def draw(state: State) -> np.uint64:
    """64 random bits; moves `state` on."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(z ^ (z >> np.uint64(31)))


@compiled
def below(state: State, bound: int) -> int:
    """A random whole number in [0, bound), bound < 2**31."""
    return int(np.int64(((draw(state) >> np.uint64(33)) * np.uint64(bound)) >> np.uint64(31)))


@compiled
def uniform(state: State) -> float:
    """A random number in (0, 1)."""
    return float((np.float64(draw(state) >> np.uint64(12)) + 0.5) * (1.0 / 4503599627370496.0))
