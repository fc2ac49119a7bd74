"""How much of a matrix product's time is lost to its shape? Tile and wave quantisation.

A GPU computes an (m, k) x (k, n) product in output tiles, one a streaming multiprocessor (SM) at a time; a wave of
tiles takes as long full as nearly empty. A tile of a x b costs 2ab(k + k0) flop slots at the tile's rate; k0 stands for
its prologue and epilogue. `slot_flops` is what the device could have computed meanwhile:

    slots = waves * SMs * 2ab(k/split + k0) / rate(tile),   waves = ceil(ceil(m/a) ceil(n/b) split / SMs)

for the best of the tiles and splits of k. NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave
quantisation. Never below 2mnk.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from autopar.values.device import DTYPE_NAMES

# (rows, columns, part of the device's best rate): small tiles load more bytes a flop. The rates are assumed, in the
# order that the guide's figure 5 shows.
TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.9), (64, 256, 0.9), (128, 64, 0.85),
    (64, 128, 0.85), (64, 64, 0.7),
)  # fmt: skip
SPLITS = (1, 2, 4, 8)
K0 = 64  # assumed: two steps of a 32-wide inner loop to fill, two to drain


MISALIGNED = {1: 6.0, 2: 2.7, 4: 2.7}
"""How many times as long a product of 16-bit numbers takes whose rows are a multiple of so many and no more: tensor
cores are fed 16 bytes at a time. Odd rows took 5.6 to 7.8 times as long forward and 5.1 to 5.3 backward, even ones 2.6
to 2.9, of 4096 x 4096 x 4097 to 4100 and of 4097 to 4100 in the middle; 16384 x 768 x 50257 took 6.7 and 4.8 times what
50304 columns took. float32 takes no longer. H200, torch 2.11.0+cu130, 2026-11-26: benchmarks/device_operations.py
--unaligned."""


def is_16_bit(dtype: str) -> bool:
    """Whether it is one of the dtypes that tensor cores take as they are."""
    return DTYPE_NAMES.get(dtype, dtype) in ("bf16", "fp16")


def misaligned(rows: Sequence[int], dtype: str) -> float:
    """The factor of a product with rows of these lengths."""
    if not is_16_bit(dtype):
        return 1.0
    return MISALIGNED.get(math.gcd(*rows, 8), 1.0)


@lru_cache(maxsize=65536)
def slot_flops(m: float, n: float, k: float, num_sms: int, batch: float = 1) -> float:
    """Flop slots that `batch` products of (m, k) x (k, n) occupy."""
    return min(
        _waves(-(-m // rows) * -(-n // columns) * batch * split, num_sms) * num_sms
        * 2 * rows * columns * (k / split + K0) / rate
        for rows, columns, rate in TILES
        for split in SPLITS
        if split == 1 or k / split >= 1024
    )  # fmt: skip


def _waves(tiles: float, num_sms: int) -> float:
    return float(-(-tiles // num_sms))
