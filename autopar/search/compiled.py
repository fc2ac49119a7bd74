"""How is a kernel of the search compiled: by Numba, cached on disk, without the interpreter's lock, `/` as in NumPy.

Numba's cache knows when a kernel's own file changes, not when one that it calls does; so the cache lies in a folder
named by a hash of all kernels' sources, in the user's cache (`AUTOPAR_CACHE`, else `XDG_CACHE_HOME`, else ~/.cache).

Kernels are iterative (recursive ones with a cache crashed) and use no generator of their own: whoever calls passes a
`state`, one uint64, so that a seed decides everything (splitmix64: Steele, Lea, Flood, OOPSLA 2014).
"""

import hashlib
import os
import tempfile
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


@cache
def cache_folder() -> str:
    """Where compiled kernels of these very sources lie; a new folder of this process's own where none can be made."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        if b"@compiled" in (source := file.read_bytes()):
            digest.update(source)
    base = os.environ.get("AUTOPAR_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "autopar" / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return tempfile.mkdtemp(prefix="autopar-kernels-")
    return str(folder)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A kernel of whole loops."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()  # read when a function is decorated
    try:
        kernel = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
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
