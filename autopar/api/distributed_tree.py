"""What does a decorated model hold once it is distributed? The distributed module's parameters and buffers, in its own
tree, and what it consisted of, which is looked at again at every call.

Inside `itself` it is what it was before: capture runs its own forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

MODULE, ITSELF, _EMPTY, _FORM, _TABLES = (
    f"_autopar_{name}" for name in ("module", "itself", "empty", "form", "tables")
)

OWN = (ITSELF, _EMPTY, _FORM, _TABLES)
"""What a copy makes anew."""


def become(model: nn.Module, module: Any) -> None:
    """Let a model's own tree hold the distributed module's parameters and buffers; those it had lose their values."""
    from autopar.runtime.parts import Buffers
    from autopar.runtime.trainable import NotWrapped

    for part in nn.Module.modules(model):
        part._buffers = Buffers(part._buffers, module.flush)
    model.__dict__[_EMPTY] = _emptied(model)
    model.__dict__[MODULE] = module  # not a submodule: it would be a part of itself
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = NotWrapped()
    variants = module._variants
    variants.captor = replace(
        variants.captor,
        model=model,
        original=lambda: itself(model),
        is_live=True,
        captured_again=lambda: _note_form(model),
    )
    hold(model, module)
    parts = [(nn.Module.get_submodule(model, name), part) for name, part in module.named_modules()]
    pairs: list[tuple[Any, Any]] = [(own._parameters, part._parameters) for own, part in parts]
    pairs += [(own._buffers, part._buffers) for own, part in parts]
    model.__dict__[_TABLES] = [(table, held, frozenset(table)) for table, held in pairs]
    _note_form(model)


def hold(model: nn.Module, module: nn.Module) -> None:
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        path, _, leaf = name.rpartition(".")
        owner: Any = nn.Module.get_submodule(model, path)
        table = owner._parameters if leaf in owner._parameters else owner._buffers
        table[leaf] = tensor


def _emptied(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Where parameters and buffers of a model are, and what stands for them when it is captured again: parameters
    without values, buffers as they were."""
    known: dict[int, nn.Parameter] = {}
    found: list[tuple[dict[str, Any], str, Any]] = []
    for part in nn.Module.modules(model):
        for name, own in part._parameters.items():
            if own is not None and id(own) not in known:
                known[id(own)] = nn.Parameter(own.detach().to("meta"), requires_grad=own.requires_grad)
                known[id(own)]._backward_hooks = own._backward_hooks
            found.append((part._parameters, name, own if own is None else known[id(own)]))
        found += [(part._buffers, name, own) for name, own in part._buffers.items()]
    return found


@contextmanager
def itself(model: nn.Module) -> Iterator[Any]:
    """Inside, the model is what it was before it was distributed, and its calls distribute nothing; what it is then."""
    held, empty = model.__dict__.pop(MODULE, None), model.__dict__.get(_EMPTY, [])
    model.__dict__[ITSELF] = model.__dict__.get(ITSELF, 0) + 1
    now = [table[name] for table, name, _ in empty]
    try:
        for table, name, own in empty:
            table[name] = own
        yield held
    finally:
        for (table, name, _), own in zip(empty, now, strict=True):
            table[name] = own
        model.__dict__[ITSELF] -= 1
        if held is not None:
            model.__dict__[MODULE] = held


def _note_form(model: nn.Module) -> None:
    """Take what the model consists of for what was captured."""
    from autopar.runtime.parts import CapturedForm

    model.__dict__[_FORM] = CapturedForm(model)


def follow(model: nn.Module) -> None:
    """Let the distributed module have the parameters and buffers that the model's own tree has by now.

    Raises:
        ArgumentError: if something else of the model was changed.
    """
    model.__dict__[_FORM].check()
    take_over(model)


def take_over(model: nn.Module) -> None:
    for table, held, before in model.__dict__[_TABLES]:
        for leaf in [leaf for leaf, value in dict.items(held) if table.get(leaf) is not value]:
            held[leaf] = table.get(leaf)
        for leaf in table.keys() - before - held.keys():  # what was added; other stages' were there before
            held[leaf] = table.get(leaf)
