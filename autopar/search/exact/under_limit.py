"""How is a memory limit met? What a caller of the mixed program knows of it, and asks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderLimit:
    """How a memory limit is met.

    `binds`: it is known that what is cheapest without the limit does not fit, and need not be found again.
    `say_least`: where nothing fits, find out what would. `prices`: seconds a byte by moment, of a graph like this one,
    from which prices of memory start; replaced by those found. `mixes`: a mixture of two choices that promises to be
    near enough will do as well, and no program is solved for a better single one.
    """

    binds: bool = False
    say_least: bool = True
    prices: dict[int, float] | None = None
    mixes: bool = False
