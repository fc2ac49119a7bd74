"""Graphs of the tiny families, each traced once a run of tests: workers share what they traced as files."""

import os
from functools import cache
from pathlib import Path

import torch

from autopar.capture import capture
from autopar.graph import CapturedModel
from autopar.serialize import dump, load
from tests.zoo import zoo

SHARED = "AUTOPAR_TEST_GRAPHS"
"""The variable that names the folder of a run (`tests/conftest.py`); benchmarks have none."""


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
    folder = os.environ.get(SHARED)
    file = Path(folder) / f"{family}-{dropout}-{dtype}-{batch}-{seq}" if folder else None
    if file is not None and file.exists():
        return load(file.read_bytes())
    model, kwargs = zoo(family, dropout=dropout, dtype=dtype, batch=batch, seq=seq)
    captured = capture(model, (), kwargs)
    if file is not None:
        half = file.with_name(f"{file.name}-{os.getpid()}")  # a file that is there is whole
        half.write_bytes(dump(captured))
        half.rename(file)
    return captured
