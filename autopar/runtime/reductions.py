"""When are the gradients of a bucket waited for? When backward ends, so that it goes on while they travel.

What a reduce-scatter reads stays in memory until it is done, so no more than one is on its way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from autopar.ops.buckets import Finish
from autopar.runtime.private_torch import when_backward_ends


class Late:
    """A sink (`ops.buckets`) for one module's backward passes; `give` takes gradients by placeholder."""

    def __init__(self, give: Callable[[str, Tensor], None]) -> None:
        self.give = give
        self.told: list[Finish] | None = None
        self._holding: list[Finish] = []

    def begin(self) -> None:
        """Forget a backward pass that failed."""
        self._holding.clear()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A whole step: what is only told is waited for at its end."""
        self.told = []
        try:
            yield
            for finish in self.told:
                finish()
        finally:
            self.told = None

    def later(self, finish: Finish, *, holds: bool) -> None:
        if not holds:
            when_backward_ends(finish)
            return
        self._holding.append(finish)
        when_backward_ends(self.make_room)

    def add(self, placeholder: str, gradient: Tensor) -> None:
        self.give(placeholder, gradient)

    def make_room(self) -> None:
        while self._holding:
            self._holding.pop()()
