"""Work in a copy of this process: its answer comes back whole, and nothing that goes wrong there reaches the caller."""

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

import autopar.capture.forked as forked
from autopar.capture.forked import Forked
from autopar.capture.rebatch import Batches
from autopar.values.graph import CapturedModel
from tests.zoo_graphs import zoo_graph

pytestmark = pytest.mark.skipif(not forked.can_fork(), reason="no second core, or no fork")


def _gone(child: int) -> bool:
    try:
        os.kill(child, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 5_000_000])
def test_what_the_copy_made_comes_back_whole(size: int) -> None:
    made = Forked(lambda: os.getpid().to_bytes(8, "big") + bytes(size))
    found = made.answer(60.0)
    assert found is not None and len(found) == 8 + size and int.from_bytes(found[:8], "big") != os.getpid()
    assert made.answer(60.0) is None  # once
    assert _gone(made._child)


def test_a_copy_computes_though_kernels_ran_in_threads_before() -> None:
    """OpenMP's threads do not survive in it: a kernel that waits for them never ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = torch.arange(4_000_000).add(1)
        found = Forked(lambda: int(torch.arange(4_000_000).add(1).sum()).to_bytes(8, "big")).answer(20.0)
    finally:
        torch.set_num_threads(before)
    assert found is not None and int.from_bytes(found, "big") == int(whole.sum())


def _raise() -> NoReturn:
    raise RuntimeError("fake tensors on a device that does not survive a fork")


def _die() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def _leave() -> bytes:
    os._exit(0)


@pytest.mark.parametrize("work", [_raise, _die, _leave])
def test_a_copy_that_fails_gives_no_answer(work: Callable[[], bytes], capfd: pytest.CaptureFixture[str]) -> None:
    assert Forked(work).answer(60.0) is None
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_sleeps_is_not_waited_for() -> None:
    def sleep() -> bytes:
        time.sleep(600)
        return b""

    asleep, unasked = Forked(sleep), Forked(sleep)
    assert asleep.answer(0.2) is None and _gone(asleep._child)
    unasked.close()
    assert unasked.answer(60.0) is None and _gone(unasked._child)


def test_half_an_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy dies while it writes."""
    write = os.write

    def half(end: int, data: memoryview) -> int:
        write(end, data[: len(data) // 2])
        os._exit(0)

    monkeypatch.setattr(os, "write", half)
    assert Forked(lambda: bytes(1000)).answer(60.0) is None


def test_where_nothing_can_be_forked_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "can_fork", lambda: False)
    assert Forked(lambda: b"x").answer(60.0) is None

    def refuse() -> int:
        raise OSError("no memory")

    monkeypatch.undo()
    monkeypatch.setattr(os, "fork", refuse)
    assert Forked(lambda: b"x").answer(60.0) is None


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_captured_beside_are_those_captured_here(fails: bool) -> None:
    """Of every size; if the copy fails they are captured here after all."""
    here, sizes = os.getpid(), list[int]()

    def capture(size: int) -> CapturedModel:
        if fails and os.getpid() != here:
            raise RuntimeError("not in a copy")
        sizes.append(size)
        return zoo_graph("llama", size)

    plain, beside = (Batches(capture=capture, batch=8) for _ in range(2))
    beside.begin_line()
    wanted = {size: plain.at(size).fingerprint for size in (8, 4, 2, 1)}
    sizes.clear()
    assert {size: beside.at(size).fingerprint for size in (8, 4, 2, 1)} == wanted
    assert sizes == ([8, 1] if fails else [8]) or sizes == ([1, 8] if fails else [8])
    beside.close()


def test_of_what_is_captured_beside_only_the_last_that_was_begun_goes_on() -> None:
    """A better plan was found: the graph of the one before is of no use."""
    batches = Batches(capture=lambda size: zoo_graph("llama", size), batch=8)
    batches.begin(4)
    first = batches._beside[4]
    batches.begin(4)
    assert batches._beside == {4: first}
    batches.begin(2)
    assert list(batches._beside) == [2] and first.answer(1.0) is None
    assert batches.captured(2).fingerprint == zoo_graph("llama", 2).fingerprint
    batches.begin(2)
    assert not batches._beside  # it is there
    batches.close()
