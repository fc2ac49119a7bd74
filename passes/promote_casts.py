"""What would a model compute in float64 throughout? Casts to a lower precision inside it would drown a comparison.

Models cast to float32 in places (RMSNorm, softmax, rotary embedding). To check a rewritten graph to 1e-10, those casts
are promoted on both sides; that the captured graph equals the eager module as it is, is a check of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from autopar.ops.own_gradient import Applied, Hooked
from autopar.passes.graph_tools import infer_meta, tidy, verify
from autopar.passes.normalize.drop_noops import drop_noops
from autopar.values.graph import CapturedModel

LOWER = (torch.float32, torch.float16, torch.bfloat16)


def promote_casts(captured: CapturedModel) -> CapturedModel:
    """A copy of the model in which every floating value is float64, constants, state and inputs included."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        copy = graph.node_copy(node, env.__getitem__)
        env[node] = copy
        if node.op == "call_function":
            copy.args, copy.kwargs = _promoted(copy.args), _promoted(copy.kwargs)
            copy.target = _promoted_target(copy.target)
            infer_meta(copy)
        elif node.op == "placeholder":
            copy.meta["val"] = copy.meta["val"].to(_promoted(copy.meta["val"].dtype))
    promoted = replace(
        captured,
        graph=graph,
        parameters=tuple(replace(p, dtype=_promoted(p.dtype)) for p in captured.parameters),
        buffers=tuple(replace(b, dtype=_promoted(b.dtype)) for b in captured.buffers),
        inputs=tuple(replace(i, dtype=_promoted(i.dtype)) for i in captured.inputs),
        constants={name: value.to(_promoted(value.dtype)) for name, value in captured.constants.items()},
    )
    promoted = tidy(drop_noops(promoted))
    verify(promoted)
    return promoted


@contextmanager
def promoted_eager() -> Iterator[None]:
    """Inside, an eager module's own casts to a lower precision give float64 as well."""
    with _Promote():
        yield


class _Promote(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        return func(*_promoted(tuple(args)), **_promoted(kwargs or {}))


def _promoted_target(target: Any) -> Any:
    """A call of the user's own with the dtypes among its arguments replaced."""
    if isinstance(target, Applied):
        return replace(target, args=_promoted(target.args), kwargs=_promoted(target.kwargs))
    return replace(target, steps=_promoted(target.steps)) if isinstance(target, Hooked) else target


def _promoted(value: Any) -> Any:
    """The value with every lower floating dtype in it replaced, lists and mappings included."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in LOWER else torch.complex128 if value == torch.complex64 else value
    if type(value) in (list, tuple, fx.immutable_collections.immutable_list):
        return type(value)(_promoted(item) for item in value)
    if isinstance(value, dict):
        return {key: _promoted(item) for key, item in value.items()}
    return value
