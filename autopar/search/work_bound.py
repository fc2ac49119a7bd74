"""What does a step cost at least, whatever the plan? All work split evenly over all ranks, and nothing sent.

    sum over micro-batches and ops of roofline(flops / n, bytes / n), forward and backward
    + sum over parameters of the optimizer's step over 1/n of the elements

with n ranks (1 for ops without a rule, which run whole). A choice splits an op into at most n parts, and a rank's part
of a tensor has at least 1/n of its elements. A weak bound, but one that costs nothing.
"""

import math

from autopar.cost_models.compute import compute_seconds
from autopar.cost_models.memory import optimizer_step_seconds
from autopar.search.pricing import Pricer
from autopar.search.program import Op, Program


def work_bound(program: Program, pricer: Pricer) -> float:
    """Seconds that no plan of `program` on the pricer's mesh stays below, in its cost model."""
    cache: dict[int, float] = {}
    total = 0.0
    for op in program.ops:
        if op.signature not in cache:
            cache[op.signature] = _op_seconds(op, pricer)
        total += cache[op.signature] * program.microbatches
    for tensor in program.tensors.values():
        if tensor.kind == "parameter" and tensor.requires_grad:
            elements = math.prod(tensor.shape) / pricer.mesh.size
            total += optimizer_step_seconds(
                pricer.config.optimizer, elements, tensor.element_size, pricer.cluster.device
            )
    return total


def _op_seconds(op: Op, pricer: Pricer) -> float:
    rule, device = op.rule, pricer.cluster.device
    if rule.alias is not None:
        return 0.0
    parts = pricer.mesh.size if rule.known else 1
    shapes, sizes = (*op.operand_shapes, *op.result_shapes), (*op.operand_sizes, *op.result_sizes)
    moved = sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True)) / parts
    seconds = compute_seconds(rule.flops / parts, moved, op.dtype, device)
    if op.has_backward:
        flops = 2 * rule.flops if rule.backward_flops is None else rule.backward_flops
        seconds += compute_seconds(flops / parts, 2 * moved, op.dtype, device)
    return seconds
