"""Which tensors does a call hand to a model, and under which path? `input_ids`, `0`, `batch.pixel_values`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import ArgumentError, BatchError
from autopar.values.graph import InputSpec

Rebuild = Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], Rebuild]:
    """Every leaf of a call with its path, and the function that makes `(args, kwargs)` of as many other leaves.

    Positions come first, then keywords by name (their order is the caller's taste).

    Raises:
        ArgumentError: if two leaves have one path, as those of `{"a.b": x, "a": {"b": y}}` have.
    """
    ordered = {key: kwargs[key] for key in sorted(kwargs)}
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), ordered))

    def rebuild(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = pytree.tree_unflatten(values, spec)
        return args, kwargs

    named = [(path_name(path), leaf) for path, leaf in leaves]
    if len({path for path, _ in named}) < len(named):
        twice = Counter(path for path, _ in named).most_common(1)[0][0]
        raise ArgumentError(f"two inputs of the call are both called {twice!r}; give one of them another key")
    return named, rebuild


def leaves_of(value: Any) -> list[Any]:
    """Leaves of nested lists, tuples, mappings and registered dataclasses, in order."""
    return list(pytree.tree_leaves(value))


def taken_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """`leaves_of` a value, and the function that makes one like it of as many others."""
    leaves, structure = pytree.tree_flatten(value)
    return leaves, lambda others: pytree.tree_unflatten(others, structure)


def mapped_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Nested lists, tuples and mappings with every tensor in them exchanged."""
    return pytree.tree_map_only(Tensor, function, value)


def path_name(path: tuple[Any, ...]) -> str:
    """`(args, 0)` -> `0`, `(kwargs, batch, x)` -> `batch.x`."""
    parts = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path[1:]]
    return ".".join(parts)


def bind_inputs(inputs: Sequence[InputSpec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The call's tensors by placeholder name.

    Raises:
        BatchError: if a captured tensor input is missing, or one is given that was not captured.
    """
    given = {path: leaf for path, leaf in flatten_inputs(args, kwargs)[0] if isinstance(leaf, Tensor)}
    wanted = {spec.path for spec in inputs}
    if wanted != set(given):
        raise BatchError(
            f"the model was captured with tensor inputs {sorted(wanted)} but was called with {sorted(given)}; "
            "call it with the same arguments, or plan again with these"
        )
    return {spec.placeholder: given[spec.path] for spec in inputs}
