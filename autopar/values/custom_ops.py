"""Which module registers an op that torch does not have? (Private torch API, kept in this file.)"""

import torch


def defining_module(op: torch._ops.OpOverload) -> str | None:
    """The module whose import registers a `torch.library.custom_op`, None for torch's own ops."""
    if op.namespace in ("aten", "prims", "prim"):
        return None
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(f"{op.namespace}::{op._schema.name.split('::')[1]}")
    return None if definition is None else str(definition._init_fn.__module__)
