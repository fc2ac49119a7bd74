"""Half of what exporting a small model takes is torch's own, the same for every model: what may be kept is kept here.

Each export asks which composite ops there are, namespace by namespace, and gives each of them two dozen kernels for its
time. The answer to the first only changes with what is registered; the second spends most of its time on annotations.
Both do here what they do in torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._export import utils
from torch._ops import OperatorBase


def quicken_export() -> None:
    """Replace the two, for this process and those that are copied from it; a torch without them is left as it is."""
    materialize, implement = getattr(utils, "_materialize_cpp_cia_ops", None), OperatorBase.py_impl
    if materialize is None:
        return
    known: list[int] = [-1]

    def materialize_new() -> None:
        registered = len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if registered != known[0]:
            materialize()
            known[0] = registered

    def py_impl(self: OperatorBase, key: Any) -> Callable[[Any], Any]:
        if not isinstance(key, torch._C.DispatchKey) or key == torch._C.DispatchKey.Python:
            return implement(self, key)

        def keep(kernel: Any) -> Any:
            if key in self.py_kernels:
                raise RuntimeError(f"Trying to override a python impl for {key} on operator {self.name()}")
            self.py_kernels[key] = kernel
            self._dispatch_cache.clear()
            return kernel

        return keep

    utils._materialize_cpp_cia_ops = materialize_new
    OperatorBase.py_impl = py_impl  # type: ignore[method-assign]
