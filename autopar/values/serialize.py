"""A captured model as bytes: rank 0 captures and plans once, the others receive both and import no model code.

Graph nodes become plain tuples; ops are named (`aten.linear.default`), functions pickled by reference. An op that a
library registered (transformers' grouped matmul) is found again by importing the module that defined it.
"""

import importlib
import io
import pickle
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError, PassError
from autopar.values.custom_ops import defining_module
from autopar.values.graph import CapturedModel


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


@dataclass(frozen=True, slots=True)
class _Op:
    """An OpOverload by name, and the module whose import registers it."""

    name: str
    module: str | None


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a tensor; strides too, for what is sent of a view that is not contiguous is a copy."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def dump(captured: CapturedModel) -> bytes:
    """`captured` as bytes for `load`."""
    nodes = []
    reference, op, shape = cache(_Reference), cache(_op), cache(_Shape)  # most nodes are alike
    for node in captured.graph.nodes:
        named: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: reference(n.name))  # type: ignore[arg-type, return-value]
        args, kwargs = named
        target = op(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shapes: Any = shape(*_sizes(value))
        else:
            shapes = [shape(*_sizes(one)) for one in value] if value is not None else None
        nodes.append(
            (node.op, node.name, target, args, kwargs, shapes, node.meta.get("requires_grad"), node.meta.get("module"))
        )
    rest = {
        "name": captured.name,
        "parameters": captured.parameters,
        "buffers": captured.buffers,
        "inputs": captured.inputs,
        "loss": captured.loss,
        "accumulation": captured.accumulation,
        "training": captured.training,
        "received": captured.received,
        "sends": captured.sends,
        "guards": captured.guards,
    }
    buffer = io.BytesIO()
    torch.save(dict(captured.constants), buffer)
    return pickle.dumps((nodes, rest, buffer.getvalue()))


def load(data: bytes) -> CapturedModel:
    """The inverse of `dump`."""
    nodes, rest, constants = pickle.loads(data)
    meta, find = cache(_meta), cache(_find)  # most nodes are alike
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, shapes, requires_grad, module in nodes:
        args, kwargs = _resolve((args, kwargs), made)
        target = find(target) if isinstance(target, _Op) else target
        node = graph.create_node(op, target, tuple(args), kwargs, name=name)
        if node.name != name:
            raise PassError(f"node {name} came back as {node.name}")
        if shapes is not None:
            node.meta["val"] = meta(shapes) if isinstance(shapes, _Shape) else tuple(map(meta, shapes))
            node.meta["requires_grad"] = requires_grad
            node.meta["module"] = module
        made[name] = node
    return CapturedModel(graph=graph, constants=torch.load(io.BytesIO(constants), weights_only=True), **rest)


def _op(target: torch._ops.OpOverload) -> _Op:
    return _Op(str(target), defining_module(target))


def _find(op: _Op) -> Any:
    if op.module is not None:
        importlib.import_module(op.module)
    found: Any = torch.ops
    try:
        for part in op.name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise CaptureError(f"op {op.name} is not registered here; import the library that defines it first") from error
    return found


def _sizes(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.stride(), value.dtype


def _meta(shape: _Shape) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device="meta")


def _resolve(value: Any, made: dict[str, fx.Node]) -> Any:
    if isinstance(value, _Reference):
        return made[value.name]
    if isinstance(value, (tuple, list)):
        return type(value)(_resolve(v, made) for v in value)
    if isinstance(value, dict):
        return {k: _resolve(v, made) for k, v in value.items()}
    return value
