"""What a model computes in one process, whatever group of processes captures it: torch.distributed looks not started.

A model that reads the world size (codebooks, balance losses) would otherwise sum over ranks by itself, and be another
model on every number of ranks. (Private torch API, kept in this file.)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from autopar.values.group_lock import GROUP_LOCK

ENVIRONMENT = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
"""What torchrun tells a process of its group."""


@contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, no process group is initialised, the world size is 1 and the rank 0.

    What is replaced is looked up by torch's own functions when they are called, so that names which a model imported
    (`from torch.distributed import get_rank`) answer alike. A save that runs beside training is waited for.
    """
    told = {name: value for name, value in ENVIRONMENT.items() if name in os.environ}
    with GROUP_LOCK, mock.patch.dict(os.environ, told):
        if not dist.is_available():
            yield
            return
        from torch.distributed import distributed_c10d as c10d

        group, codes = c10d.GroupMember.WORLD, {f: f.__code__ for f in (c10d.get_rank, c10d.get_world_size)}
        try:
            c10d.GroupMember.WORLD = None
            c10d.get_rank.__code__ = _first.__code__
            c10d.get_world_size.__code__ = _single.__code__
            yield
        finally:
            c10d.GroupMember.WORLD = group
            for function, code in codes.items():
                function.__code__ = code


def _first(group: Any = None) -> int:
    return 0


def _single(group: Any = None) -> int:
    return 1
