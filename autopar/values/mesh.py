"""How are ranks arranged? A mesh of named axes, row-major: the last axis joins neighbouring ranks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from autopar.errors import MeshError
from autopar.values.domains import POSITIVE

DEFAULT_NAMES = {
    1: ("data",),
    2: ("data", "model"),
    3: ("data", "context", "model"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`shape[i]` ranks along axis `names[i]`; axis 0 is the slowest link level, the last one the fastest.

    Names are labels for people: what an axis is used for is decided by the plan, tensor by tensor.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.shape or not all(POSITIVE.holds(n) for n in self.shape):
            raise MeshError(f"mesh {self.shape}: every axis needs at least one rank; write it as 2x2 or data=2,model=2")
        if len(self.names) != len(self.shape) or len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh {self.shape} with names {self.names}: give each axis one name of its own")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Coordinates of `rank`, one per axis."""
        out = []
        for n in reversed(self.shape):
            out.append(rank % n)
            rank //= n
        return tuple(reversed(out))

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """All coordinates in rank order."""
        return product(*(range(n) for n in self.shape))

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) + f" ({', '.join(self.names)})"


def make_mesh(shape: tuple[int, ...]) -> Mesh:
    """A mesh with the default axis names."""
    names = DEFAULT_NAMES.get(len(shape)) or tuple(f"axis{i}" for i in range(len(shape)))
    return Mesh(shape=shape, names=names)


def parse_mesh(text: str) -> Mesh:
    """`2x2`, `8` or `data=2,model=4` as a mesh.

    Raises:
        MeshError: if the text is neither form.
    """
    try:
        if "=" in text:
            pairs = [part.split("=") for part in text.split(",")]
            return Mesh(shape=tuple(int(n) for _, n in pairs), names=tuple(name.strip() for name, _ in pairs))
        return make_mesh(tuple(int(n) for n in text.lower().split("x")))
    except (ValueError, MeshError) as error:
        raise MeshError(
            f"mesh {text[:60]!r} is not of the form 2x2 or data=2,model=2 with whole numbers from 1"
        ) from error
