"""How do ranks save and load as one? What fails on one rank fails on all, and no rank waits without end.

Ranks meet in a group of their own (Gloo, on the CPU), so that a save beside training stays out of its collectives.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, CheckpointError, RankError
from autopar.runtime.launch import collective_timeout

T = TypeVar("T")
Group = dist.ProcessGroup

_made: tuple[Any, Group] | None = None
"""The default group, and the group that was made for it."""


def checkpoint_group() -> Group:
    """The group in which ranks save and load; the first call of a run makes it, on all ranks together."""
    global _made
    default = dist.group.WORLD
    if _made is None or _made[0] is not default:
        try:
            made = dist.new_group(backend="gloo", timeout=timedelta(seconds=collective_timeout()))
        except RuntimeError as error:
            raise lost("meeting to save or load", error) from error
        _made = default, made
    return _made[1]


def on_all(what: str, call: Callable[[], T], group: Group) -> T:
    """What `call` returns on this rank, once it has returned on all; raises as `from_all`."""
    own: list[T] = []
    from_all(what, lambda: own.append(call()), group)
    return own[0]


def from_all(what: str, call: Callable[[], T], group: Group) -> list[T]:
    """What `call` returns on each rank, by rank.

    Raises:
        CheckpointError: on every rank, if it fails on any; a rank's own typed error stays what it is there.
        RankError: if a rank dies, or does not come within the collective timeout.
    """
    own: tuple[bool, Any]
    failure: Exception | None = None
    try:
        own = True, call()
    except Exception as error:
        failure = error
        own = False, f"{type(error).__name__}: {error}"
    answers = _gathered(what, own, group)
    failed = {rank: text for rank, (good, text) in enumerate(answers) if not good}
    if isinstance(failure, AutoparError):
        raise failure
    if failed:
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise CheckpointError(f"{what} failed on {reasons}") from failure
    return [value for _, value in answers]


def on_first(what: str, call: Callable[[], T], group: Group) -> T:
    """What `call` returns on rank 0, on every rank; raises as `from_all`."""
    answers = from_all(what, call if dist.get_rank() == 0 else lambda: None, group)
    first: Any = answers[0]
    return first  # type: ignore[no-any-return]


def _gathered(what: str, own: Any, group: Group) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(answers, own, group=group)
    except RuntimeError as error:
        raise lost(what, error) from error
    return answers


def lost(what: str, error: BaseException) -> RankError:
    """The error of a rank whose others do not answer."""
    return RankError(
        f"rank {dist.get_rank()}: {what} ended, for a rank died or did not come within {collective_timeout():.0f} s "
        f"({error}); checkpoints before this one are as they were"
    )
