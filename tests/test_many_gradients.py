"""The merge of more gradients than are cut one by one."""

import random

import numpy as np
import pytest

from autopar.cost_models.gradient_exchange import merged_gradients
from autopar.cost_models.gradient_exchange.merged_gradients import merge_with_starts, seconds_with_starts
from tests.test_gradient_exchange import random_model


@pytest.mark.parametrize("seed", range(20))
def test_very_many_gradients_are_cut_between_parts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later than the best merge by no more than a part takes to be ready and to travel; ends are cut anywhere."""
    rng = random.Random(seed)
    model = random_model(seed, rng.randint(40, 120))
    alpha, beta = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-11, -9)

    count, how = len(model.ready), (lambda n: alpha + beta * n, alpha, beta)
    best = merge_with_starts(model.ready, model.nbytes, *how)
    monkeypatch.setattr(merged_gradients, "PARTS", 10)
    monkeypatch.setattr(merged_gradients, "ENDS", 8)
    groups = merge_with_starts(model.ready, model.nbytes, *how)
    assert [k for first, last in groups for k in range(first, last + 1)] == [*range(count)]
    firsts = merged_gradients._parts(model.nbytes)
    assert len(firsts) < count and {*range(8), *range(count - 8, count)} <= {*firsts.tolist()}
    assert {first for first, _ in groups} <= {*firsts.tolist()} and sum(
        8 <= first < count - 8 for first in firsts
    ) <= 10
    whole = np.add.reduceat(model.nbytes, firsts)[8:-8]
    assert whole.max() <= model.nbytes[8:-8].sum() / 10 + model.nbytes.max()
    part = model.nbytes.sum() / 10 + 2 * model.nbytes.max()
    most = 1 + max(np.searchsorted(np.cumsum(model.nbytes[k:]), part) for k in range(count))
    waits = max(model.ready[min(k + most, count - 1)] - model.ready[k] for k in range(count))
    least, found = (seconds_with_starts(one, model.ready, model.nbytes, *how) for one in (best, groups))
    assert least * (1 - 1e-12) <= found <= least + waits + 2 * beta * part
