"""What does autograd keep of an op without a rule? The op is tried on meta tensors, and what is saved is looked at."""

import torch
from torch import Tensor, fx

from autopar.rules.describe import result_values
from autopar.values.graph import operands, requires_grad


def kept_by_autograd(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Operands and results that are kept, and bytes beside them; all of both where the op does not run on meta tensors.

    Ops whose own code makes tensors of real values (a loop over the lengths of groups) do not.
    """
    sources = operands(node)
    values = iter(
        [torch.empty_like(s.meta["val"]).requires_grad_(requires_grad(s) and _has_gradient(s)) for s in sources]
    )
    tensors: list[Tensor] = []

    def taken(_: fx.Node) -> Tensor:
        tensors.append(next(values))
        return tensors[-1]

    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[id(tensor.untyped_storage())] = tensor
        return tensor

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), taken)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError):
        return tuple(range(len(sources))), tuple(range(len(result_values(node)))), 0
    results = tuple(result) if isinstance(result, tuple | list) else (result,)
    read = tuple(i for i, t in enumerate(tensors) if saved.pop(id(t.untyped_storage()), None) is not None)
    made = tuple(i for i, t in enumerate(results) if saved.pop(id(t.untyped_storage()), None) is not None)
    return read, made, sum(t.untyped_storage().nbytes() for t in saved.values())


def _has_gradient(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
