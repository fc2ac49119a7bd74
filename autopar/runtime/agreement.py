"""Do all ranks mean the same? Compared through the store of the default group, before the first collective.

A collective between ranks with different plans hangs or computes nonsense; a store only waits, and for a bounded time.
Each meeting has a number that every rank counts alike. A rank writes its facts (or why it failed) under that number,
rank 0 reads them all and writes the verdict, every rank reads the verdict.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from autopar.errors import RankError
from autopar.runtime.launch import collective_timeout
from autopar.runtime.private_torch import Store, default_store

GRACE_SECONDS = 2.0
"""Once a difference is seen, how long rank 0 waits for the others before it says what it knows."""

ACKNOWLEDGE_SECONDS = 5.0
"""How long rank 0, who may host the store, waits for the others to read a bad verdict."""

_FAILURE = "failed"
_meetings = 0


def agree(
    facts: Mapping[str, str], shared: Mapping[str, str] | None = None, *, same: str = "model, plan and libraries"
) -> None:
    """Return if every rank calls with the same facts.

    shared: facts that only those ranks have in common that give one of the name. same: what ranks are to have alike.

    Raises:
        RankError: on every rank, if facts differ (naming ranks and facts), a rank failed before it came here, or one
            does not come within the collective timeout.
    """
    verdict = _meet(facts, shared or {}, same)
    if verdict:
        raise RankError(verdict)


@contextmanager
def failing_together() -> Iterator[None]:
    """If the body fails on one rank before it reaches `agree`, the others fail there at once and name that rank."""
    before = _meetings
    try:
        yield
    except Exception as error:
        if _meetings == before and dist.is_initialized() and dist.get_world_size() > 1:
            _meet({_FAILURE: f"{type(error).__name__}: {error}"}, {}, "")
        raise


def _meet(facts: Mapping[str, str], shared: Mapping[str, str], same: str) -> str:
    """The verdict: empty if all agree."""
    global _meetings
    number, _meetings = _meetings, _meetings + 1
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return ""
    store = default_store()
    prefix = f"autopar/agreement/{number}"
    try:
        store.set(f"{prefix}/{rank}", json.dumps([dict(facts), dict(shared)]))
        if rank == 0:
            verdict = _judge(store, prefix, world, same)
            store.set(f"{prefix}/verdict", verdict)
            if verdict:
                _until_read(store, prefix, world)
            return verdict
        store.wait([f"{prefix}/verdict"], timedelta(seconds=collective_timeout() + ACKNOWLEDGE_SECONDS))
        verdict = store.get(f"{prefix}/verdict").decode()
        store.add(f"{prefix}/read", 1)
        return verdict
    except RuntimeError as error:
        return f"rank {rank}: no word from rank 0 on whether all ranks run the same plan ({error}); see rank 0's output"


def _judge(store: Store, prefix: str, world: int, same: str) -> str:
    found: dict[int, Mapping[str, str]] = {}
    shared: dict[int, Mapping[str, str]] = {}
    deadline = time.monotonic() + collective_timeout()
    while True:
        for rank in range(world):
            if rank not in found and store.check([f"{prefix}/{rank}"]):
                found[rank], shared[rank] = json.loads(store.get(f"{prefix}/{rank}"))
        if len(found) == world:
            return compare(found, shared, same)
        if compare(found, shared, same):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            late = [rank for rank in range(world) if rank not in found]
            return (
                compare(found, shared, same)
                or f"ranks {late} did not come within {collective_timeout():.0f} s; see their output"
            )
        time.sleep(0.005)


def compare(
    facts: Mapping[int, Mapping[str, str]],
    shared: Mapping[int, Mapping[str, str]] | None = None,
    same: str = "model, plan and libraries",
) -> str:
    """What differs between ranks, in words; empty if nothing does."""
    shared = shared or {}
    failed = {rank: own[_FAILURE] for rank, own in sorted(facts.items()) if _FAILURE in own}
    if failed:
        return "; ".join(f"rank {rank} failed with {reason}" for rank, reason in failed.items())
    lines = [*_differing(facts, among_all=True), *_differing(shared, among_all=False)]
    if not lines:
        return ""
    return "ranks differ in " + "; ".join(lines) + f"; give every rank the same {same}"


def _differing(facts: Mapping[int, Mapping[str, str]], *, among_all: bool) -> Iterator[str]:
    """Facts that ranks differ in; among all: a rank without one differs too."""
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        ranks: dict[str | None, list[int]] = {}
        for rank, own in sorted(facts.items()):
            if among_all or name in own:
                ranks.setdefault(own.get(name), []).append(rank)
        if len(ranks) > 1:
            yield f"{name}: " + ", ".join(f"{value} on ranks {who}" for value, who in ranks.items())


def _until_read(store: Store, prefix: str, world: int) -> None:
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    while store.add(f"{prefix}/read", 0) < world - 1 and time.monotonic() < deadline:
        time.sleep(0.005)


def shared_number(own: int) -> int:
    """Rank 0's number on every rank; all ranks call this in the same order."""
    global _meetings
    number, _meetings = _meetings, _meetings + 1
    if dist.get_world_size() == 1:
        return own
    store, key = default_store(), f"autopar/number/{number}"
    if dist.get_rank() == 0:
        store.set(key, str(own))
        return own
    try:
        store.wait([key], timedelta(seconds=collective_timeout()))
        return int(store.get(key))
    except RuntimeError as error:
        raise RankError(f"rank {dist.get_rank()}: no word from rank 0 ({error}); see rank 0's output") from error
