"""Where does a model hold its parameters and buffers a second time? In lists, dicts, tuples and objects of attributes.

A trace exchanges the tensors of `module._parameters` and `module._buffers` for its own. What forward reads by another
reference to the same tensor (`self.weights = [self.a, self.b]`) would be a constant of the graph, without a gradient:
inside `followed`, such references are to the tensors that the trace has put in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_CLOSED = (nn.Module, Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, str, bytes)
_TABLES = ("_parameters", "_buffers", "_modules")
DEPTH = 3
"""How deep attributes are looked into: `self.a.b["c"]` is 2 deep."""


class HeldState:
    """The second references of a model, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: dict[int, tuple[dict[str, Any], str]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                self._tables.update({id(tensor): (table, name) for name, tensor in table.items() if tensor is not None})
        self._places: list[tuple[Any, Any, Any]] = []
        seen: set[int] = set()
        for module in model.modules():
            own = vars(module)
            for key, value in own.items():
                if key not in _TABLES:
                    self._look(own, key, value, seen, DEPTH)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, they are references to what stands in the model's tables on entering."""
        for container, key, value in self._places:
            container[key] = self._current(value)
        try:
            yield
        finally:
            for container, key, value in self._places:
                container[key] = value

    def _look(self, container: Any, key: Any, value: Any, seen: set[int], depth: int) -> None:
        if self._is_held(value):
            self._places.append((container, key, value))
        if isinstance(value, _CLOSED) or id(value) in seen or not depth:
            return
        seen.add(id(value))
        inner: Any = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", None)
        items = inner.items() if isinstance(inner, dict) else enumerate(inner) if inner is not None else ()
        for name, item in list(items):
            if not isinstance(inner, tuple) or not isinstance(item, Tensor | tuple):
                self._look(inner, name, item, seen, depth - 1)

    def _current(self, value: Any) -> Any:
        """The value with tensors of the model exchanged for those that stand in their place."""
        if type(value) is tuple:
            return tuple(self._current(item) for item in value) if self._is_held(value) else value
        if id(value) not in self._tables:
            return value
        table, name = self._tables[id(value)]
        return table.get(name, value)

    def _is_held(self, value: Any) -> bool:
        if type(value) is tuple:
            return any(self._is_held(item) for item in value)
        return id(value) in self._tables
