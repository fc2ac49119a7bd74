"""Graphs of the tiny families, each traced once a run of tests."""

from functools import cache

import torch

from autopar.capture import capture
from autopar.values.graph import CapturedModel
from tests.shared_graphs import shared_graph
from tests.zoo import zoo


@cache
def zoo_graph(
    family: str,
    rows: int | None = None,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    batch: int = 8,
    seq: int = 16,
) -> CapturedModel:
    """The graph of `zoo(family, ...)`, or of the first `rows` of its batch; not to be changed."""
    if rows is not None:  # no graph knows of which batch its rows are
        return zoo_graph(family, dropout=dropout, dtype=dtype, batch=rows, seq=seq)

    def traced() -> CapturedModel:
        model, kwargs = zoo(family, dropout=dropout, dtype=dtype, batch=batch, seq=seq)
        return capture(model, (), kwargs)

    return shared_graph(f"{family}-{dropout}-{dtype}-{batch}-{seq}", traced)
