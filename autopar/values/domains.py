"""Which numbers may a user give? Whole ones of a range, or finite ones; anything else is an error before any work.

The upper ends are far beyond what anybody plans for and below what torch, a table or a clock cannot count: 2^31 samples
of 2^31 elements are the most that a tensor's int64 sizes address, and a wait of 1e9 s overflows no timer.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from autopar.errors import ArgumentError

MOST_SAMPLES = 2**31
MOST_DEVICES = 2**20
"""Of a cluster. The largest that train one model have some 2^18; with more, tables of divisors grow past a second."""
MOST_PROCESSES = 1024
"""That one machine is asked to start."""
MOST_GB = 1e9
MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The numbers that an argument may be.

    whole: whole numbers alone. least, most: both allowed, but for those that are `excluded`. words: texts that are
    allowed too. instead: what to do, for the message.
    """

    whole: bool = True
    least: float = 1
    most: float = MOST_SAMPLES
    excluded: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    instead: str = ""

    def holds(self, value: object) -> bool:
        """Whether it is one of them; True and False are no numbers."""
        if isinstance(value, str):
            return value in self.words
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number = int(value) if isinstance(value, Integral) else float(value)
        return self.least <= number <= self.most and number not in self.excluded

    def __str__(self) -> str:
        low = f"above {self.least:g}" if self.least in self.excluded else f"from {_spoken(self.least)}"
        high = f"below {self.most:g}" if self.most in self.excluded else f"to {_spoken(self.most)}"
        numbers = f"a {'whole ' if self.whole else ''}number {low} {high}"
        return " or ".join([numbers, *self.words])


POSITIVE = Domain()
COUNT = Domain(words=("auto",))
SECONDS = Domain(
    whole=False, least=0, most=MOST_SECONDS, excluded=(0,), instead="a search needs time; leave it out for no limit"
)
MEMORY_GB = Domain(whole=False, least=0, most=MOST_GB, excluded=(0,), instead="leave it out for what the device has")
GAP = Domain(whole=False, least=0, most=1, excluded=(1,), instead="0.01 stops within 1% of the best")
TIMEOUT = Domain(whole=False, least=0, most=MOST_SECONDS, excluded=(0,), instead="300 waits five minutes for a rank")
NOT_NEGATIVE = Domain(least=0)
PROCESSES = Domain(most=MOST_PROCESSES)


def checked_number(what: str, value: object, domain: Domain) -> int | float | str:
    """The value as Python's own int or float.

    Raises:
        ArgumentError: if it is none of the domain.
    """
    if not domain.holds(value):
        instead = f"; {domain.instead}" if domain.instead else ""
        raise ArgumentError(f"{what} {_shown(value)} is not {domain}{instead}")
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) >= 10**18:
        return f"of about {'-' if value < 0 else ''}10^{int(math.log10(abs(int(value))))}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _spoken(end: float) -> str:
    return str(int(end)) if float(end).is_integer() and end < 10**15 else f"{end:g}"
