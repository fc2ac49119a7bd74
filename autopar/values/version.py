"""Which torch does this autopar support, and which one runs?"""

import torch

TORCH_RANGE = ("2.11", "3")
"""Plans made with one torch of this range load with any other: first supported, first not supported."""


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number. Raises ValueError if it has none."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def in_range(low: str, high: str, version: str = torch.__version__) -> bool:
    """Whether `low` <= `version` < `high`, by major and minor number."""
    return _numbers(low) <= _numbers(version) < _numbers(high)
