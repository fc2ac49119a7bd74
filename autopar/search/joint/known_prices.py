"""Which prices of memory were found? There the next search within memory begins."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class KnownPrices:
    """Seconds a byte by moment, of the whole model in one micro-batch, for each number of stages."""

    _of: dict[int, dict[int, float]] = field(default_factory=dict)

    def of(self, pipeline: int) -> dict[int, float]:
        """At first those of another number, scaled: the whole model on fewer devices takes longer, and has no more
        room."""
        if not self._of.get(pipeline):
            known = [p for p, prices in self._of.items() if prices]
            near = min(known, key=lambda p: abs(math.log(p / pipeline)), default=pipeline)
            self._of[pipeline] = _times(self._of.get(near, {}), pipeline / near)
        return self._of[pipeline]

    @contextmanager
    def at(self, pipeline: int, microbatches: int) -> Iterator[dict[int, float]]:
        """Those to begin with; what they have become in the end is known from then on. To run again what takes so many
        seconds a step spares bytes of one micro-batch: the more of these, the more a byte is worth."""
        prices = _times(self.of(pipeline), microbatches)
        try:
            yield prices
        finally:  # what excludes a candidate ends with an error
            self._of[pipeline] = _times(prices, 1 / microbatches)

    def remember(self, pipeline: int, prices: dict[int, float]) -> None:
        if prices:
            self._of[pipeline] = dict(prices)


def _times(prices: dict[int, float], factor: float) -> dict[int, float]:
    return {moment: price * factor for moment, price in prices.items()}
