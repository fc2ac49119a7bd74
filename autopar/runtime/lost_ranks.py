"""What does a rank say when the others do not answer? A `RankError` that names what they were to do together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from autopar.errors import RankError

BETWEEN_STAGES = "sending or receiving between stages"


@contextmanager
def among_ranks(what: str) -> Iterator[None]:
    """What fails inside, between ranks alone, is a RankError; `what` says what they do there."""
    try:
        yield
    except (RankError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK")
        raise RankError(
            f"rank {rank}: {what} failed: {error}; another rank died or hangs, its own output says why"
        ) from error
