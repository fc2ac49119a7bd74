"""How do tensors lie under a plan, and which views copy therefore? Those of what a collective has laid out anew.

What a collective gives is contiguous, whatever its operand was. Where that is the query of attention, which lies in the
whole graph as a permutation left it, the result is contiguous too, and joining its heads, a view in the whole graph, is
a copy. Strides are those of whole tensors: a rank's part of a contiguous tensor is contiguous.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.lower.program import Program
from autopar.lower.target import Target
from autopar.passes.lay_out import is_known, results_of
from autopar.rules.spare import short_name
from autopar.rules.views import RESHAPING, is_view
from autopar.values.graph import operands
from autopar.values.placement import Layout
from autopar.values.stage_plan import StagePlan


class MemoryLayouts(NamedTuple):
    """strides: tensors without values that lie otherwise than in the whole graph. copies: results of view ops that have
    storage of their own."""

    strides: dict[str, Tensor]
    copies: set[str]


def find_memory_layouts(
    program: Program, plan: StagePlan, target: Target, is_laid_anew: Callable[[str, Layout], bool]
) -> MemoryLayouts:
    """What a plan's collectives change of how tensors lie; is_laid_anew: whether one made a tensor contiguous."""
    memory_layouts: dict[str, Tensor] = {}
    copies = set[str]()
    for op in program.ops:
        if not any(name in program.strided or name in memory_layouts for name in op.operands):
            continue
        layouts = zip(op.operands, target.op(op, plan.choices[op.name]).operands, strict=True)
        anew = {name for name, layout in layouts if is_laid_anew(name, layout)}
        own = {name: value for name, value in memory_layouts.items() if name in op.operands and name not in anew}
        own |= {name: torch.empty_like(program.strided[name], memory_format=torch.contiguous_format)
                for name in anew if name in program.strided}  # fmt: skip
        if not own or not is_known(op.node):
            continue
        sources = zip(operands(op.node), op.operands, strict=True)
        value = results_of(op.node, {source.name: own[name] for source, name in sources if name in own})
        (result,) = op.results if isinstance(value, Tensor) else (None,)
        if result is None:
            continue
        if value.stride() != op.node.meta["val"].stride():
            memory_layouts[result] = value
        is_reshape = op.rule.alias is not None and short_name(op.node) in RESHAPING
        if is_reshape and (source := own.get(op.operands[0])) is not None and not is_view(source, op.result_shapes[0]):
            copies.add(result)
    return MemoryLayouts(memory_layouts, copies)
