"""Rows that no other row beats in every column: as trying every pair says."""

import numpy as np

from autopar.search.graph.undominated import undominated


def test_no_row_that_is_kept_is_beaten_and_each_that_is_not_is() -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        table = draw.integers(0, draw.integers(2, 12), (draw.integers(1, 40), 4)).astype(np.float64)
        kept = undominated(table)
        for row, values in enumerate(table):
            others = [other for other in range(len(table)) if (table[other] <= values).all()]
            beaten = any((table[other] < values).any() or other < row for other in others)
            assert (row in kept) != beaten
