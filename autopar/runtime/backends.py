"""torch.compile's backends with our partitioner. Of private torch: aot_autograd, a backend from its parts (2.13)."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from autopar.errors import ArgumentError
from autopar.runtime.partition import eager_partition

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]


def backend_of(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ArgumentError: if there is none.
    """
    if name == "aot_eager":
        eager: Backend = aot_autograd(fw_compiler=_as_it_is, partition_fn=eager_partition)
        return eager
    if name == "inductor":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which inductor's own imports call
            from autopar.runtime.inductor import inductor
        return inductor
    raise ArgumentError(f"no compile backend {name!r}; use inductor or aot_eager")


def _as_it_is(graph: fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(graph.forward)
