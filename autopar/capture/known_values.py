"""Real values of traced tensors that follow from constants and buffers alone, evaluated when first asked for.

While a model is traced on fake tensors, each call whose tensor operands are all known is noted, and nothing is
computed. The first question about a value runs the notes in their order on real tensors, whose views and in-place
writes behave as the model's do: what is written through a view is read through its base. What cannot be known taints
its storage: the result of a random call, memory that nothing has written, a write that reads an unknown tensor.

A value has *sources*, the buffers that it was computed from: an answer that has some holds as long as they do.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.capture.fake_twin import has_value
from autopar.capture.real_values import is_wrapped, place_of, real_values, storage_of

LARGEST, ALTOGETHER = 1 << 22, 1 << 26
"""Elements of one tensor that is followed, and of all that are evaluated: 16 and 256 MB of fp32. A mask of 2,048 x
2,048 is known, and one that is larger is not; what Python asks about is far smaller."""
UNKNOWN = ""
"""The source of what cannot be known."""
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
FILLS = {"fill_", "zero_"}


@dataclass(frozen=True, slots=True)
class _Note:
    """A call to evaluate; without `function` a write of what is unknown into `written`."""

    function: Callable[..., Any] | None
    args: Any = ()
    kwargs: Any = None
    result: Any = None
    written: Tensor | None = None


class KnownValues:
    """The values known in one trace. `buffers`: real ones by name, those on the meta device left out."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = {name: b for name, b in buffers.items() if has_value(b) and b.layout == torch.strided}
        self._notes: list[_Note] = []
        self._followed: dict[int, Tensor] = {}  # kept, so that no id is given twice
        self._versions: dict[int, int] = {}
        self._values: dict[int, Tensor] = {}
        self._sources: dict[int, frozenset[str]] = {}
        self._lacking: dict[int, str] = {}
        self._left = ALTOGETHER

    def bind(self, traced: Mapping[str, Tensor]) -> None:
        """Take `traced` tensors, by name, for the buffers of these names."""
        for name, tensor in traced.items():
            if id(tensor) in self._values or not self._follow(tensor):
                continue
            real = self._buffers.get(name)
            if real is None:
                self._lacking[id(tensor)] = name
                continue
            with real_values():
                self._values[id(tensor)] = value = real.detach().to("cpu", copy=True)
            self._sources[storage_of(value)] = frozenset({name})

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Note a call that has been made, if its result may be known or it may have changed what is."""
        operands = list(tensors_in((args, kwargs)))
        followed = [tensor for tensor in operands if self._is_followed(tensor)]
        if operands and not followed:
            return
        results = list(tensors_in(result))
        if len(followed) == len(operands) and (
            any([self._follow(tensor) for tensor in results]) or function.__name__ == "__setitem__"
        ):
            self._notes.append(_Note(function, args, kwargs, result))
            self._note_versions(followed)
            return
        for tensor in followed:
            if has_value(tensor):
                continue
            storage, version = place_of(tensor)
            if self._versions.get(storage) != version:
                self._versions[storage] = version
                self._notes.append(_Note(None, written=tensor))

    def value(self, tensor: Tensor) -> tuple[Tensor, frozenset[str]] | None:
        """What a traced tensor holds, and the buffers that it was computed from; None where that is not known."""
        if not self._is_followed(tensor):
            return None
        with real_values():
            notes, self._notes = self._notes, []
            for note in notes:
                self._evaluate(note)
            value = self._real(tensor)
            if value is None:
                return None
            sources = self._sources.get(storage_of(value), frozenset())
        if UNKNOWN in sources or (
            not has_value(tensor) and self._versions.get(place_of(tensor)[0]) != place_of(tensor)[1]
        ):
            return None
        return value, sources

    def lacking(self, tensor: Tensor) -> str:
        """A buffer without a value that a traced tensor follows from, an empty text for none."""
        return self._lacking.get(id(tensor), "")

    def set(self, tensor: Tensor, value: Tensor, sources: frozenset[str]) -> None:
        """Let a traced tensor hold this value from here on."""
        if self._follow(tensor):
            self._values[id(tensor)] = value
            self._sources[storage_of(value)] = sources

    def _is_followed(self, tensor: Tensor) -> bool:
        return id(tensor) in self._followed or (
            type(tensor) is Tensor and has_value(tensor) and not tensor.requires_grad and self._follow(tensor)
        )

    def _follow(self, tensor: Tensor) -> bool:
        if id(tensor) in self._followed:
            return True
        if tensor.layout != torch.strided or tensor.numel() > LARGEST or is_wrapped(tensor):
            return False
        self._followed[id(tensor)] = tensor
        if not has_value(tensor):
            self._note_versions([tensor])
        return True

    def _note_versions(self, followed: list[Tensor]) -> None:
        for tensor in followed:
            if not has_value(tensor):
                storage, version = place_of(tensor)
                self._versions[storage] = version

    def _real(self, tensor: Tensor) -> Tensor | None:
        if id(tensor) not in self._values and has_value(tensor):
            self._values[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return self._values.get(id(tensor))

    def _evaluate(self, note: _Note) -> None:
        if note.function is None:
            assert note.written is not None
            self._taint([self._real(note.written)])
            return
        given = list(tensors_in((note.args, note.kwargs)))
        operands = [self._real(tensor) for tensor in given]
        results = list(tensors_in(note.result))
        lacking = next((self._lacking[id(tensor)] for tensor in given if id(tensor) in self._lacking), None)
        if lacking is not None:
            self._lacking |= dict.fromkeys(map(id, results), lacking)
        if any(value is None for value in operands) or self._left < 0:
            self._taint(operands)
            self._forget(results)
            return
        known = [value for value in operands if value is not None]
        versions = [value._version for value in known]
        try:
            args, kwargs = _mapped((note.args, note.kwargs or {}), self._values)
            found = list(tensors_in(note.function(*args, **kwargs)))
        except Exception:  # whatever a call without values cannot do here: what it would have made is not known
            self._taint(operands)
            self._forget(results)
            return
        sources = frozenset().union(*(self._sources.get(storage_of(value), frozenset()) for value in known))
        changed = [v for v, before in zip(known, versions, strict=True) if v._version != before]
        name = note.function.__name__
        if name in FILLS and _covers_storage(known[0]):
            self._sources[storage_of(known[0])] = frozenset()
        else:
            for value in changed:
                self._sources[storage_of(value)] = self._sources.get(storage_of(value), frozenset()) | sources
        for tensor, value in zip(results, found, strict=False):
            if value.shape != tensor.shape or value.dtype != tensor.dtype or len(found) != len(results):
                self._forget([tensor])
                continue
            self._left -= value.numel()
            self._values[id(tensor)] = value
            if not any(value is operand for operand in known):
                own = sources | ({UNKNOWN} if name in EMPTY else frozenset[str]())
                self._sources[storage_of(value)] = self._sources.get(storage_of(value), frozenset()) | own

    def _taint(self, values: list[Tensor | None]) -> None:
        for value in values:
            if value is not None:
                self._sources[storage_of(value)] = self._sources.get(storage_of(value), frozenset()) | {UNKNOWN}

    def _forget(self, results: list[Tensor]) -> None:
        for tensor in results:
            self._taint([self._values.pop(id(tensor), None)])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif type(value) is dict:
        for part in value.values():
            yield from tensors_in(part)
    elif type(value) is slice:
        yield from tensors_in((value.start, value.stop, value.step))


def _mapped(value: Any, values: Mapping[int, Tensor]) -> Any:
    """Arguments with values in place of traced tensors, on the CPU whatever device they name."""
    if isinstance(value, Tensor):
        return values[id(value)]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list):
        return [_mapped(part, values) for part in value]
    if isinstance(value, tuple):
        parts = [_mapped(part, values) for part in value]
        return tuple(parts) if type(value) in (tuple, torch.Size) else type(value)(*parts)
    if type(value) is dict:
        return {
            key: "cpu" if key == "device" and part is not None else _mapped(part, values) for key, part in value.items()
        }
    if type(value) is slice:
        return slice(*(_mapped(part, values) for part in (value.start, value.stop, value.step)))
    return value


def _covers_storage(value: Tensor) -> bool:
    return value.is_contiguous() and value.numel() * value.element_size() == value.untyped_storage().nbytes()
