"""Which calls act element by element, broadcasting their operands?"""

from typing import Any

import torch

from autopar.passes.graph_tools import is_aten

aten = torch.ops.aten

# Elementwise by definition, but not tagged so in torch.
UNTAGGED = {
    aten._to_copy.default,
    aten.__and__.Tensor,
    aten.__and__.Scalar,
    aten.__or__.Tensor,
    aten.__or__.Scalar,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.floor_divide.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
}


def is_elementwise(target: Any) -> bool:
    """Does a call compute each element of its result from the elements at the same (broadcast) place alone?"""
    if not is_aten(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target in UNTAGGED or torch.Tag.pointwise in target.tags
