"""State of Python that goes on changing is refused by line wherever it is kept, if a value hangs on it at any call.

What only notes, trims, prints or reads back its own notes is harmless: the graph is the eager module over ten calls.
"""

import contextvars
import functools
import inspect
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager

WIDTH = 4
COUNT = 0
NOTES: list[int] = []
TABLES: dict[int, Tensor] = {}
ONCE = functools.lru_cache(lambda: itertools.count())
CONTEXT = contextvars.ContextVar[int]("CONTEXT")


@functools.lru_cache
def rope(size: int) -> Tensor:
    return torch.linspace(0, 1, size, dtype=torch.float64).sin()


def table(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = torch.linspace(0, 1, size, dtype=torch.float64).cos()
    return TABLES[size]


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Deep:
    def __init__(self) -> None:
        self.inner = Slots()


def ticking() -> Callable[[], int]:
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return count

    return tick


def naturals() -> Iterator[int]:
    yield from range(1_000)


class Net(nn.Module):
    calls = 0

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.between = between
        self.step, self.phase, self.text, self.pair = 0, 0, "", ()
        self.last: Any = None
        self.notes: list[Any] = []
        self.ring = [0, 0, 0, 0, 1]
        self.recent = deque[Any](maxlen=5)
        self.table: dict[Any, Any] = {}
        self.marks = set[int]()
        self.counter = Counter[str]()
        self.deep = Deep()
        self.mean = torch.zeros((), dtype=torch.float64)
        self.tick = ticking()
        self.numbers, self.cycle, self.naturals = iter(range(1_000)), itertools.cycle([1, 1, 1, 2]), naturals()
        self.array, self.bytes = np.zeros(1), bytearray(1)
        self.dice = random.Random(0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.between(self, self.a(x)), y)

    @functools.lru_cache  # noqa: B019
    def doubled(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float64) * 2

    @functools.cached_property
    def tripled(self) -> Tensor:
        return torch.ones(WIDTH, dtype=torch.float64) * 3


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(6, WIDTH, dtype=torch.float64), "y": torch.randn(6, WIDTH, dtype=torch.float64)}


def list_length(own: Net, h: Tensor) -> Tensor:
    own.notes.append(1)
    return h * 2 if len(own.notes) > 4 else h


def list_truth(own: Net, h: Tensor) -> Tensor:
    own.notes.append(1)
    if len(own.notes) > 6:
        own.notes.clear()
    return h * 2 if own.notes else h


def list_loop(own: Net, h: Tensor) -> Tensor:
    own.notes.append(1)
    for number, _ in enumerate(own.notes):
        h = h * 2 if number == 4 else h
    return h


def list_index(own: Net, h: Tensor) -> Tensor:
    own.notes.append(2)
    try:
        return h * own.notes[4]
    except IndexError:
        return h


def list_order(own: Net, h: Tensor) -> Tensor:
    own.ring.append(own.ring.pop(0))
    return h * 2 if own.ring[-1] else h


def deque_length(own: Net, h: Tensor) -> Tensor:
    own.recent.append(h.detach().mean())
    return h * 2 if len(own.recent) >= 5 else h


def dict_keys(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    own.table[own.step] = 1
    return h * 2 if 5 in own.table else h


def dict_value(own: Net, h: Tensor) -> Tensor:
    own.table["n"] = own.table.get("n", 0) + 1
    return h * 2 if own.table["n"] > 4 else h


def set_members(own: Net, h: Tensor) -> Tensor:
    own.marks.add(len(own.marks))
    return h * 2 if 4 in own.marks else h


def counter(own: Net, h: Tensor) -> Tensor:
    own.counter["n"] += 1
    return h * 2 if own.counter["n"] > 4 else h


def deep(own: Net, h: Tensor) -> Tensor:
    own.deep.inner.count += 1
    return h * 2 if own.deep.inner.count > 4 else h


def closure(own: Net, h: Tensor) -> Tensor:
    return h * 2 if own.tick() > 4 else h


def module_global(own: Net, h: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return h * 2 if COUNT > 4 else h


def global_list(own: Net, h: Tensor) -> Tensor:
    NOTES.append(1)
    return h * 2 if len(NOTES) > 4 else h


def class_attribute(own: Net, h: Tensor) -> Tensor:
    type(own).calls += 1
    return h * 2 if type(own).calls > 4 else h


def default_argument(own: Net, h: Tensor, _notes: list[int] = []) -> Tensor:  # noqa: B006
    _notes.append(1)
    return h * 2 if len(_notes) > 4 else h


def iterator(own: Net, h: Tensor) -> Tensor:
    return h * 2 if next(own.numbers) > 4 else h


def cycled(own: Net, h: Tensor) -> Tensor:
    return h * next(own.cycle)


def generator(own: Net, h: Tensor) -> Tensor:
    return h * 2 if next(own.naturals) > 4 else h


def cached_iterator(own: Net, h: Tensor) -> Tensor:
    return h * 2 if next(ONCE()) > 4 else h


def cache_hits(own: Net, h: Tensor) -> Tensor:
    h = h * rope(WIDTH)
    return h * 2 if rope.cache_info().hits > 4 else h


def numpy_array(own: Net, h: Tensor) -> Tensor:
    own.array[0] += 1
    return h * 2 if own.array[0] > 4 else h


def byte_array(own: Net, h: Tensor) -> Tensor:
    own.bytes[0] += 1
    return h * 2 if own.bytes[0] > 4 else h


def own_dice(own: Net, h: Tensor) -> Tensor:
    return h * 2 if own.dice.random() < 0.01 else h


def context(own: Net, h: Tensor) -> Tensor:
    CONTEXT.set((CONTEXT.get(None) or 0) + 1)
    return h * 2 if CONTEXT.get() > 4 else h


def text(own: Net, h: Tensor) -> Tensor:
    own.text += "a"
    return h * 2 if len(own.text) > 4 else h


def growing_tuple(own: Net, h: Tensor) -> Tensor:
    own.pair = (*own.pair, 1)
    return h * 2 if len(own.pair) > 4 else h


def as_index(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * [1, 1, 1, 1, 2][own.step % 5]


def as_key(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * {5: 2}.get(own.step, 1)


def as_text(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * 2 if f"{own.step}" == "5" else h


def as_range(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    for _ in range(own.step // 5):
        h = h * 2
    return h


def as_bits(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * 2 if own.step & 4 else h


def late_phase(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    if own.step % 3 == 0:
        own.phase += 1
    return h * 2 if own.phase > 1 else h


def late_value(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    if own.step % 4 == 0:
        own.last = own.step
    return h if own.last is None else h * 2


def much_later(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * 2 if own.step > 5_000 else h


def warming(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * min(1.0, own.step / 3)


def averages(own: Net, h: Tensor) -> Tensor:
    h = h - own.mean
    own.mean = 0.5 * own.mean + 0.5 * h.detach().mean()
    return h


def swallowed(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    try:
        return h * own.step
    except Exception:
        return h


REFUSED = (
    *(list_length, list_truth, list_loop, list_index, list_order, deque_length, dict_keys, dict_value, set_members),
    *(counter, deep, closure, module_global, global_list, class_attribute, default_argument),
    *(iterator, cycled, generator, cached_iterator, cache_hits, numpy_array, byte_array, own_dice, context),
    *(text, growing_tuple, as_index, as_key, as_text, as_range, as_bits, late_phase, late_value, swallowed),
    *(much_later, warming, averages),
)
NAMES = {list_length: "Net.notes", own_dice: "Net.dice", warming: r"Net.step .*\(0, then 1\)", averages: "Net.mean"}


@pytest.mark.parametrize("between", REFUSED)
def test_what_a_later_call_computes_otherwise_is_refused_by_line_and_left_as_it_was(between: Any) -> None:
    lines, first = inspect.getsourcelines(ticking if between is closure else between)
    own, before = Net(between), (COUNT, list(NOTES), Net.calls)
    with pytest.raises(CaptureError, match=rf"test_changing_state\.py:\d+: .*{NAMES.get(between, '')}") as caught:
        capture(own, (), inputs())
    line = int(str(caught.value).split("test_changing_state.py:")[1].split(":")[0])
    assert first < line < first + len(lines), str(caught.value)
    assert (COUNT, NOTES, Net.calls) == before and own.step == own.phase == 0
    assert own.notes == [] and own.mean.item() == 0 and own.dice.random() == random.Random(0).random()
    assert next(own.numbers) == next(own.naturals) == 0 and own.tick() == 1


def keeps_metrics(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    own.phase, own.pair = h.shape[0], (h,)
    own.table["norm"] = h.detach().norm()
    own.table["calls"] = own.table.get("calls", 0) + 1
    own.last = 0.9 * (own.last or 0.0) + 0.1 * h.detach().mean().item()
    if own.step % 100 == 0:
        print("step", own.step, f"{own.table['norm']}", len(own.notes))
    return h


def trims(own: Net, h: Tensor) -> Tensor:
    own.notes.append(h.detach().mean())
    if len(own.notes) > 3:
        own.notes.pop(0)
    own.recent.append(1)
    return h


def reads_its_own(own: Net, h: Tensor) -> Tensor:
    own.notes.append(h)
    return own.notes[-1] * 2


def clears_before(own: Net, h: Tensor) -> Tensor:
    own.notes.clear()
    own.notes.extend((h, h * 2))
    return torch.stack(own.notes).sum(0)


def clears_after(own: Net, h: Tensor) -> Tensor:
    own.notes.extend((h, h * 2))
    made = torch.stack(own.notes).sum(0)
    own.notes.clear()
    return made


def reads_tables(own: Net, h: Tensor) -> Tensor:
    if WIDTH not in own.table:
        own.table[WIDTH] = torch.ones(WIDTH, dtype=torch.float64)
    return h * rope(WIDTH) * table(WIDTH) * own.doubled(WIDTH) * own.tripled * own.table[WIDTH]


@pytest.mark.parametrize("between", [keeps_metrics, trims, reads_its_own, clears_before, clears_after, reads_tables])
def test_notes_and_tables_are_harmless(between: Any) -> None:
    own = Net(between)
    own.numbers = own.naturals = own.cycle = iter(())  # which the oracle's copy can take along
    before = {name: id(value) for name, value in vars(own).items()}
    assert_as_eager(own, inputs(), steps=10)
    assert {name: id(value) for name, value in vars(own).items()} == before
    assert not own.notes and not own.recent and not own.table


def test_no_cache_keeps_what_a_trace_made() -> None:
    rope.cache_clear()
    TABLES.clear()
    own, batch = Net(reads_tables), inputs()
    capture(own, (), batch)
    assert not TABLES and not own.table and not rope.cache_info().misses and "tripled" not in vars(own)
    expected = own(**batch)
    capture(own, (), batch)
    assert own(**batch).item() == expected.item() and type(rope(WIDTH)) is Tensor
