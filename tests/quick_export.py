"""Half of what exporting a small model takes is torch's own, the same for every model: what may be kept is kept here.

Each export asks which composite ops there are, namespace by namespace, and twice gives each of them two dozen kernels
for its time. The answer to the first only changes with what is registered, the kernels only with those that an op had
before; torch makes both here, once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch.export import exported_program

Kernels = dict[Any, Any]


def quicken_export() -> None:
    """Replace the two, for this process and those that are copied from it; a torch without them is left as it is."""
    if hasattr(exported_program, "_collect_all_valid_cia_ops"):
        exported_program._collect_all_valid_cia_ops = _kept_ops(exported_program._collect_all_valid_cia_ops)
    if hasattr(exported_program, "_override_composite_implicit_decomp"):
        override: Any = _kept_kernels(exported_program._override_composite_implicit_decomp)
        exported_program._override_composite_implicit_decomp = override


def _kept_ops(collect: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    known: dict[tuple[int, int], set[Any]] = {}

    def kept() -> set[Any]:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        key = len(registered), len(torch.ops._dir)
        if key not in known:
            known.clear()
            known[key] = collect()
        return known[key]

    return kept


def _kept_kernels(override: Any) -> Any:
    known: dict[tuple[OpOverload[..., Any], Any], tuple[Kernels, Kernels, Any]] = {}

    @contextmanager
    def kept(decompositions: Mapping[Any, Any]) -> Iterator[None]:
        before: dict[Any, Kernels] = {}
        try:
            for op, function in decompositions.items():
                was, kernels, rule = known.get((op, function), ({None: None}, {}, None))
                if was != op.py_kernels:
                    was = op.py_kernels.copy()
                    with override({op: function}):
                        kernels, rule = op.py_kernels.copy(), fake_impls.op_implementations_dict.get(op)
                    known[op, function] = was, kernels, rule
                before[op] = was
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
                fake_impls.op_implementations_dict.setdefault(op, rule)
            yield
        finally:
            for op, kernels in before.items():
                op.py_kernels.clear()
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
                fake_impls._deregister_op_impl(op)

    return kept
