"""What do the stages of a pipeline send at least, whatever they decide? An even share of what crosses a cut."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from autopar.lower.program import Program


def crossing(program: Program, begins: Sequence[int]) -> list[list[str]]:
    """What each cut sends on and gets a gradient of: made before the stage that begins there, read in it or behind.
    Begins ascend."""
    known: dict[tuple[int, ...], list[list[str]]] = program.form.setdefault("crossing", {})
    if tuple(begins) not in known:
        known[tuple(begins)] = _crossing(program, begins)
    return known[tuple(begins)]


def _crossing(program: Program, begins: Sequence[int]) -> list[list[str]]:
    last = {name: max((p for p, _ in program.readers[name]), default=-1) for name in program.tensors}
    made = [(name, t.producer) for name, t in program.tensors.items() if t.producer is not None and t.requires_grad]
    cuts: list[list[str]] = [[] for _ in begins]
    for name, position in made:
        for cut in cuts[bisect_right(begins, position) : bisect_right(begins, last[name])]:
            cut.append(name)
    return cuts


def least_messages(program: Program, num_devices: int, cuts: Sequence[Sequence[str]]) -> list[float]:
    """Bytes a rank of the least message over each cut, given by the names that cross it, from so many devices."""
    tensors = [[program.tensors[name] for name in names] for names in cuts]
    return [sum(math.prod(t.shape) * t.element_size for t in cut) / num_devices for cut in tensors]
