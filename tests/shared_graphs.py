"""Graphs that all processes of a run of tests share: each is traced once, by who asks first, then it is in a file."""

import os
from collections.abc import Callable
from pathlib import Path

from autopar.values.graph import CapturedModel
from autopar.values.serialize import dump, load

SHARED = "AUTOPAR_TEST_GRAPHS"
"""The variable that names the folder of a run (`tests/conftest.py`); benchmarks have none."""


def shared_graph(name: str, make: Callable[[], CapturedModel]) -> CapturedModel:
    """The graph of that name, which says all that `make` depends on; not to be changed."""
    folder = os.environ.get(SHARED)
    file = Path(folder) / name if folder else None
    if file is not None and file.exists():
        return load(file.read_bytes())
    captured = make()
    if file is not None:
        half = file.with_name(f"{name}-{os.getpid()}")  # a file that is there is whole
        half.write_bytes(dump(captured))
        half.rename(file)
    return captured
