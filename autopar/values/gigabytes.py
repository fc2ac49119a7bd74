"""How are bytes of a device's memory said in messages? In units of 1e9, so that what is said can be asked for."""

import math

GB = 1e9


def gigabytes(nbytes: float) -> str:
    """A limit as it was given."""
    return f"{nbytes / GB:.12g}"


def least_gigabytes(nbytes: float) -> str:
    """A least limit to five digits, rounded up: as much as is said does."""
    if not 0 < nbytes < math.inf:
        return f"{nbytes / GB:g}"
    unit = 10.0 ** (math.floor(math.log10(nbytes)) - 4)
    return f"{math.ceil(nbytes / unit - 1e-9) * unit / GB:.5g}"
