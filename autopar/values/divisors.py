"""What divides a number: of micro-batches a batch, of ranks along an axis the devices of a level?"""

from math import isqrt


def divisors(number: int) -> tuple[int, ...]:
    """From small to large; none of a number below 1."""
    small = [n for n in range(1, isqrt(max(number, 0)) + 1) if number % n == 0]
    return (*small, *(number // n for n in reversed(small) if n * n != number))
