"""An op that ranks compute together, by the user's own function on local shards, with its own collectives."""

import importlib
from collections.abc import Callable
from typing import Any

from autopar.ops.groups import active_groups
from autopar.ops.shards import in_mesh_order

LOCAL_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""By the op's name (`mylib::scan`): what was registered beside its rule."""


def own_local(*args: Any, op: str, module: str | None, axes: tuple[str, ...], **kwargs: Any) -> Any:
    """Call the op's local function on this rank's shards.

    Args:
        args, kwargs: the call's, tensors as this rank has them.
        op: the op's name.
        module: whose import registers the function, where it is not registered yet.
        axes: names of the mesh axes that split what the function joins, outermost split first.

    Raises:
        RuntimeError: if nothing registered a function for the op.
    """
    if op not in LOCAL_FUNCTIONS and module is not None:
        importlib.import_module(module)
    function = LOCAL_FUNCTIONS.get(op)
    if function is None:
        raise RuntimeError(
            f"{op} is split, and no local function is registered for it on this rank; call autopar.register_rule(..., "
            "local=...) where the op is defined, so that every rank has it"
        )
    groups = active_groups()
    return function(*args, group=groups.group(in_mesh_order(axes, groups)), **kwargs)
