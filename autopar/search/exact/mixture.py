"""Two choices instead of one: equal blocks need not all decide alike, some may follow one choice, the rest another.

The least that fits lies on the lower hull of all choices in seconds and bytes (Lagrange), mostly between two of them, a
slow one that fits and a fast one that does not. Of a model of many equal blocks part may do as the one says and the
rest as the other, so that seconds and bytes are about a mixture of theirs: what the relaxation promised is had.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.search.exact.completion import Completed
from autopar.search.graph.strategy_graph import Floats

SPARE = 0.5
"""Part of the gap that is left to what a mixture takes more than it promised."""
LEAST = 1e-3
"""By what part a mixture is faster than the best single choice, at least, to be of use."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """`part` of the model as the fast choice, the rest as the slow one: about so many seconds, within the limit."""

    slow: Completed
    fast: Completed
    part: float
    seconds: float

    def lifted(self, lift: Callable[[Completed], Completed]) -> "Mixture":
        return replace(self, slow=lift(self.slow), fast=lift(self.fast))


@dataclass(slots=True)
class Seen:
    """Choices met on the way, with their bytes above the limit at each moment. mixes: whether mixtures are of use."""

    mixes: bool = True
    _choices: list[tuple[Completed, Floats]] = field(default_factory=list)

    def add(self, choice: Completed, beyond: Floats) -> None:
        self._choices.append((choice, beyond))

    def seconds(self, relative_gap: float) -> float:
        """Of the best mixture, and some of the gap asked for, as it may take more; infinite where there is none."""
        found = self.best()
        return np.inf if found is None else found.seconds * (1 + relative_gap * SPARE)

    def best(self) -> Mixture | None:
        """The mixture of two that promises least within the limit; None where one alone is as good."""
        if not self.mixes:
            return None
        fitting = [(one, beyond) for one, beyond in self._choices if (beyond <= 0.0).all()]
        alone = min((one.seconds for one, _ in fitting), default=np.inf)
        best: Mixture | None = None
        for slow, room in fitting:
            for fast, beyond in self._choices:
                if fast.seconds >= slow.seconds:
                    continue
                over = beyond > 0.0
                part = float((-room[over] / (beyond - room)[over]).min(initial=1.0))
                seconds = slow.seconds + part * (fast.seconds - slow.seconds)
                if part < 1.0 and seconds < min(alone * (1 - LEAST), np.inf if best is None else best.seconds):
                    best = Mixture(slow=slow, fast=fast, part=part, seconds=seconds)
        return best
