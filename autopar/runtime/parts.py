"""What are the parts of a distributed module? The model's own, by name and type, as holders of their parameters.

They have the class of the original part, so that `isinstance(part, nn.LayerNorm)` groups parameters as ever, and its
plain attributes to read. What they compute was captured: they do not run, and hooks or changes that would be ignored
are refused.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from torch import nn

from autopar.errors import ArgumentError

Described = tuple[str, type[nn.Module], dict[str, Any]]
"""Name, class and plain attributes of a part."""

_PLAIN = (bool, int, float, str, type(None))
_FIXED = "_autopar_fixed"


def described(model: nn.Module) -> list[Described]:
    """The parts of a model, in order, the model itself left out."""
    return [
        (name, type(part), {key: value for key, value in vars(part).items() if _is_plain(key, value)})
        for name, part in model.named_modules()
        if name
    ]


def _is_plain(name: str, value: Any) -> bool:
    values = value if type(value) is tuple else (value,)
    return name != "training" and not name.startswith("_") and all(type(one) in _PLAIN for one in values)


def take_form(root: nn.Module, parts: Iterable[Described], *, complete: bool) -> None:
    """Make containers of parameters what the parts of the original are; complete: with those that hold nothing."""
    order: dict[str, list[str]] = {}
    for name, kind, attributes in parts:
        path, _, leaf = name.rpartition(".")
        parent = _part(root, path)
        order.setdefault(path, []).append(leaf)
        if parent is None:
            continue
        if leaf not in parent._modules:
            if not complete or hasattr(parent, leaf):  # a part without parameters may be named as a method
                continue
            parent.add_module(leaf, nn.Module())
        part: Any = parent._modules[leaf]
        with suppress(TypeError):  # a class that no other can be made of
            part.__class__ = _part_class(kind)  # type: ignore[arg-type]
        vars(part).update(attributes)
        vars(part)[_FIXED] = frozenset(attributes)
    for path, names in order.items():
        parent = _part(root, path)
        if parent is not None:
            held = dict(parent._modules)
            parent._modules.clear()
            parent._modules.update({leaf: held.pop(leaf) for leaf in names if leaf in held} | held)


class Buffers(dict[str, Any]):
    """A module's buffers; reading one runs the call that waits, which may write it."""

    def __init__(self, held: Mapping[str, Any], flush: Callable[[], None]) -> None:
        super().__init__(held)
        self.flush = flush

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(super().items()), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(super().items()),)

    def __getitem__(self, name: str) -> Any:
        self.flush()
        return super().__getitem__(name)

    def items(self) -> Any:
        self.flush()
        return super().items()

    def values(self) -> Any:
        self.flush()
        return super().values()


def _part(root: nn.Module, path: str) -> nn.Module | None:
    with suppress(AttributeError):
        return root.get_submodule(path)
    return None


@cache
def _part_class(kind: type[nn.Module]) -> type[nn.Module]:
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Part, kind), body)


class _Part(nn.Module):
    """A part that holds parameters, buffers and other parts, and does not run."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            f"{type(self).__name__} is a part of a distributed module and does not run alone; call the whole module"
        )

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            f"a hook on {type(self).__name__}, a part of a distributed module, would never run: what it computes was "
            "captured; register it before planning, or on the whole module"
        )

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get(_FIXED, ()) and value != vars(self)[name]:
            raise ArgumentError(
                f"{type(self).__name__}.{name} was captured as {vars(self)[name]!r} and changes no more; set it before "
                "planning"
            )
        super().__setattr__(name, value)
