"""Which layers need tracing, and which are copies of their neighbours? A stack as a head, a repeated unit, and a tail.

Of a run of layers that repeat with a period p, its first three units are traced and the last one (with what is left
over); the units between are copies of the third. torch.export and the passes after it take time for every layer; a run
on fake tensors (`layer_traces`) takes a hundredth of that.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture.layer_traces import FEW, Traces, stacks_of, trace_layers

MAX_PERIOD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Layers `unit .. unit + period` of `stack` (positions among those kept) stand for `copies` more units after them.

    kept: the positions, among all layers, of those that are traced.
    """

    stack: str
    kept: tuple[int, ...]
    unit: int
    period: int
    copies: int

    def real(self, position: int, copy: int = 0) -> int:
        """The layer, among all, that kept layer `position` (or the copy'th copy of one of the unit) stands for."""
        return self.kept[position] + copy * self.period

    def position(self, layer: int) -> tuple[int, int]:
        """The kept layer that stands for a layer among all, and which copy of it that is (0 for itself)."""
        if layer in self.kept:
            return self.kept.index(layer), 0
        copy, offset = divmod(layer - self.kept[self.unit], self.period)
        return self.unit + offset, copy


def find_repeats(model: nn.Module, call: Callable[[], Any]) -> tuple[Repeat, ...]:
    """The repeats of a model, outermost stacks only; `call` runs it on fake tensors."""
    stacks = [path for path, stack in stacks_of(model).items() if len(list(stack.children())) >= FEW]
    traces = trace_layers(model, call, stacks) if stacks else []
    found = _outermost(traces)
    traced, repeating = {trace.stack for trace in traces}, {repeat.stack for repeat in found}
    if any(_inside(stack, traced - repeating) and not _inside(stack, repeating) for stack in set(stacks) - traced):
        traces = trace_layers(model, call, stacks, stand_in=False)  # what is inside layers counts too
        found = _outermost(traces)
    if not found:
        return ()
    with few_layers(model, found):
        short = {traces.stack: traces for traces in trace_layers(model, call, [r.stack for r in found])}
    whole = {t.stack: t for t in traces}
    return tuple(r for r in found if r.stack in short and _traced_alike(r, whole[r.stack], short[r.stack]))


def _outermost(traces: Sequence[Traces]) -> list[Repeat]:
    """Repeats of stacks that are not inside layers of one that repeats."""
    found: list[Repeat] = []
    for stack in sorted(traces, key=lambda t: t.stack.count(".")):
        if not _inside(stack.stack, {repeat.stack for repeat in found}):
            repeat = longest_repeat(stack.stack, stack.whole)
            found += [] if repeat is None else [repeat]
    return found


def _inside(stack: str, others: Collection[str]) -> bool:
    return any(stack.startswith(other + ".") for other in others)


def _traced_alike(repeat: Repeat, whole: Traces, short: Traces) -> bool:
    """Whether the layers that are kept compute among few what they computed among all.

    What precedes a layer is another one where copies were left out, so that there only its own ops are compared.
    """
    return all(short.own[i] == whole.own[layer] for i, layer in enumerate(repeat.kept))


def longest_repeat(stack: str, traces: Sequence[str]) -> Repeat | None:
    """The run of periodic traces that saves most layers, None where that is fewer than three."""
    best: tuple[int, int, int] | None = None  # layers saved, period, begin
    for period in range(1, min(MAX_PERIOD, len(traces) // 5) + 1):
        begin = 0
        while begin + period < len(traces):
            end = begin + period
            while end < len(traces) and traces[end] == traces[end - period]:
                end += 1
            saved = ((end - begin) // period - 4) * period
            if best is None or saved > best[0]:
                best = saved, period, begin
            begin = end - period + 1
    if best is None or best[0] < 3:
        return None
    saved, period, begin = best
    head = begin + 3 * period
    return Repeat(
        stack=stack,
        kept=(*range(head), *range(head + saved, len(traces))),
        unit=head - period,
        period=period,
        copies=saved // period,
    )


@contextmanager
def few_layers(model: nn.Module, repeats: Sequence[Repeat]) -> Iterator[None]:
    """The model with only the layers that are traced, and as it was afterwards."""
    tables = []
    for repeat in repeats:
        table: dict[str, Any] = model.get_submodule(repeat.stack)._modules
        tables.append((table, dict(table)))
    try:
        for repeat, (table, saved) in zip(repeats, tables, strict=True):
            layers = list(saved.values())
            table.clear()
            table.update({str(i): layers[layer] for i, layer in enumerate(repeat.kept)})
        yield
    finally:
        for table, saved in tables:
            table.clear()
            table.update(saved)
