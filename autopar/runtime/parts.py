"""What are the parts of a distributed module? The model's own, by name and type, as holders of their parameters.

They have the class of the original part, so that `isinstance(part, nn.LayerNorm)` groups parameters as ever, and its
plain attributes to read. What they compute was captured: they do not run, and hooks or changes that would be ignored
are refused, on the parts of a distributed module as on those of a decorated model (`CapturedForm`).
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
_RUNNING = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Parts of which forward runs whatever they hold."""


def described(model: nn.Module) -> list[Described]:
    """The parts of a model, in order, the model itself first."""
    return [
        (name, type(part), {key: value for key, value in vars(part).items() if _is_plain(key, value)})
        for name, part in model.named_modules()
    ]


def _is_plain(name: str, value: Any) -> bool:
    values = value if type(value) is tuple else (value,)
    return name != "training" and not name.startswith("_") and all(type(one) in _PLAIN for one in values)


def take_form(root: nn.Module, parts: Iterable[Described], *, complete: bool) -> None:
    """Make containers of parameters what the parts of the original are; complete: with those that hold nothing."""
    order: dict[str, list[str]] = {}
    for name, kind, attributes in parts:
        if not name:
            vars(root)[_FIXED] = {key: value for key, value in attributes.items() if not hasattr(root, key)}
            continue
        path, _, leaf = name.rpartition(".")
        parent = _part(root, path)
        order.setdefault(path, []).append(leaf)
        if parent is None:
            continue
        if leaf not in parent._modules:
            if not complete or hasattr(parent, leaf):  # a part without parameters may be named as a method
                continue
            nn.Module.add_module(parent, leaf, HeldPart())
        part: Any = parent._modules[leaf]
        with suppress(TypeError):  # a class that no other can be made of
            part.__class__ = _part_class(kind)  # type: ignore[arg-type]
        vars(part).update(attributes)
        vars(part)[_FIXED] = attributes
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


def seal(root: nn.Module) -> None:
    """From now on the parts of a module are not exchanged."""
    for part in root.modules():
        vars(part).setdefault(_FIXED, {})


def _part(root: nn.Module, path: str) -> nn.Module | None:
    with suppress(AttributeError):
        return root.get_submodule(path)
    return None


@cache
def _part_class(kind: type[nn.Module]) -> type[nn.Module]:
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (HeldPart, kind), body)


class HeldPart(nn.Module):
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
        refuse_change(self, name, value)
        if name == "forward":
            raise _captured(self, "forward")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        refuse_removal(self, name)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        refuse_change(self, name, module)
        super().add_module(name, module)


def refuse_change(part: nn.Module, name: str, value: Any) -> None:
    """Raises ArgumentError if an attribute is set that forward may read, and was captured with another value."""
    fixed = vars(part).get(_FIXED)
    if fixed is None:  # not captured yet
        return
    if name in fixed and value != fixed[name]:
        raise _fixed(part, name, fixed[name])
    held = vars(part).get("_modules", {})
    is_other = name in held and value is not held[name]
    if is_other or name == "_modules" or (isinstance(part, _RUNNING) and isinstance(value, nn.Module)):
        raise _captured(part, name)


def refuse_removal(part: nn.Module, name: str) -> None:
    """Raises ArgumentError if a part, parameter or buffer of a captured model is taken away."""
    tables = ("_parameters", "_buffers", "_modules")
    if _FIXED in vars(part) and any(name in vars(part)[table] for table in tables):
        raise _captured(part, name)


def _fixed(part: nn.Module, name: str, value: Any) -> ArgumentError:
    return ArgumentError(
        f"{type(part).__name__}.{name} was captured as {value!r} and changes no more; set it before planning"
    )


def _captured(part: nn.Module, name: str) -> ArgumentError:
    return ArgumentError(
        f"{type(part).__name__}.{name} was captured with what forward computes, and is not exchanged, added or removed "
        "any more; change the model before planning"
    )


class CapturedForm:
    """What a decorated model consisted of when it was captured: its parts, their plain attributes and their hooks."""

    def __init__(self, model: nn.Module) -> None:
        named = list(nn.Module.named_modules(model))
        self.tables = [(part, part._modules, tuple(part._modules.items())) for _, part in named]
        described_ = zip(named, described(model), strict=True)
        self.plain = [
            (part, name, value) for (_, part), (_, _, attributes) in described_ for name, value in attributes.items()
        ]
        self.own_forwards = {name for name, part in named if "forward" in vars(part)}
        self.named, self.num_hooks = named, _num_hooks(named)

    def check(self) -> None:
        """Raises ArgumentError if something changed that would be ignored."""
        for part, table, items in self.tables:
            if tuple(table.items()) != items:
                changed = dict(table.items() ^ set(items))
                raise _captured(part, next(iter(changed)))
        for part, name, value in self.plain:
            found = vars(part).get(name)
            if found is not value and found != value:
                raise _fixed(part, name, value)
        for name, part in self.named:
            if name and "forward" in vars(part) and name not in self.own_forwards:
                raise _captured(part, "forward")
        if _num_hooks(self.named) > self.num_hooks:
            raise ArgumentError(
                f"a hook was registered on a part of {type(self.named[0][1]).__name__} after it was distributed, and "
                "would never run: what parts compute was captured; register it before, or on the whole model"
            )


def _num_hooks(named: Iterable[tuple[str, nn.Module]]) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(vars(part)[table]) for _, part in named for table in tables)


def copy_hooks(one: nn.Module, other: nn.Module) -> None:
    """Give a copy of a module the hooks that the module has on its calls."""
    for name, table in vars(one).items():
        if name.startswith(("_forward_", "_backward_")) and isinstance(table, dict):
            vars(other)[name].update(table)
    vars(other)["_is_full_backward_hook"] = vars(one)["_is_full_backward_hook"]


def refuse_uncalled_hooks(module: nn.Module) -> None:
    """Raises ArgumentError if a step that is no call of a module has hooks on calls."""
    if _num_hooks([("", module)]):
        raise ArgumentError(
            "train_step runs forward and backward of each micro-batch itself, and no hook of the module: remove the "
            "hooks, change the batch before and the gradients after it, or register hooks on the model before planning"
        )
