"""Which prices of memory were found? There the next search within memory begins."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class KnownPrices:
    """Seconds a byte by moment, of the whole model, for each number of stages."""

    _of: dict[int, dict[int, float]] = field(default_factory=dict)

    def of(self, pipeline: int) -> dict[int, float]:
        """At first those of another number, scaled: the whole model on fewer devices takes longer, and has no more
        room."""
        if not self._of.get(pipeline):
            known = [p for p, prices in self._of.items() if prices]
            near = min(known, key=lambda p: abs(math.log(p / pipeline)), default=pipeline)
            self._of[pipeline] = {moment: price * pipeline / near for moment, price in self._of.get(near, {}).items()}
        return self._of[pipeline]

    def remember(self, pipeline: int, prices: dict[int, float]) -> None:
        if prices:
            self._of[pipeline] = dict(prices)
