"""What does a step cost at least, whatever the plan? All work split evenly over all ranks, and nothing sent.

    sum over micro-batches and ops of max(flops / n / rate, bytes / n / bandwidth), forward and backward
    + sum over parameters of the optimizer's step over 1/n of the elements

with n ranks (1 for ops without a rule, which run whole). A choice splits an op into at most n parts, and a rank's part
of a tensor has at least 1/n of its elements. A weak bound, but one that costs nothing.

Where what backward needs of a micro-batch does not fit in n devices, some is made again, by forward's work at least.
"""

import math

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Op, Program
from autopar.search.costs.op_work import moved_nbytes
from autopar.search.costs.pricing import Pricer


def work_bound(program: Program, pricer: Pricer) -> float:
    """Seconds that no plan of `program` on the pricer's mesh stays below, in its cost model."""
    return sum(work_seconds(program, pricer))


def work_seconds(program: Program, pricer: Pricer) -> tuple[float, float]:
    """Seconds of all micro-batches, and of the optimizer."""
    update = 0.0
    for name, tensor in program.tensors.items():
        if name in program.updated:
            update += pricer.update_seconds(tensor, math.prod(tensor.shape) / pricer.mesh.size)
    return float(ops_work(program, pricer).sum()) * program.microbatches, update


def ops_work(program: Program, pricer: Pricer) -> NDArray[np.float64]:
    """Seconds of each op's forward and of its backward, of one micro-batch; [ops, 2]."""
    known: dict[int, tuple[float, float]] = {}
    for op in program.ops:
        if op.signature not in known:
            known[op.signature] = _op_work(op, pricer)
    return np.array([known[op.signature] for op in program.ops]).reshape(-1, 2)


def saved_nbytes(program: Program) -> NDArray[np.float64]:
    """Bytes that autograd keeps of a micro-batch, all ranks together, if nothing is run again; by the op that made
    them, parameters left out."""
    saved: set[str] = set()
    made = np.zeros(len(program.ops))
    for op in program.ops:
        if op.has_backward:
            names = [op.operands[i] for i in op.rule.saves] + [op.results[i] for i in op.rule.saves_results]
            made[op.position] += op.rule.saves_nbytes
            for name in names:
                while name in program.aliases:
                    position, operand = program.aliases[name]
                    name = program.ops[position].operands[operand]
                if name is not None and program.tensors[name].kind == "op":
                    saved.add(name)
    for name in saved:
        tensor = program.tensors[name]
        assert tensor.producer is not None
        made[tensor.producer] += math.prod(tensor.shape) * tensor.element_size
    return made


def again_seconds(nbytes: NDArray[np.float64], seconds: NDArray[np.float64], room: float) -> float:
    """The least seconds for which all but `room` bytes can be let go of and made again (Dantzig's fractional knapsack):
    an op's `nbytes` for its `seconds`, or a part of them for the same part."""
    order = np.argsort(seconds / np.maximum(nbytes, 1.0), kind="stable")
    order = order[nbytes[order] > 0]
    gone = np.concatenate([[0.0], np.cumsum(nbytes[order])])
    paid = np.concatenate([[0.0], np.cumsum(seconds[order])])
    return float(np.interp(max(gone[-1] - room, 0.0), gone, paid))


def _op_work(op: Op, pricer: Pricer) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    rule, rates = op.rule, pricer.rates
    if rule.alias is not None:
        return 0.0, 0.0
    parts = pricer.mesh.size if rule.known else 1
    shapes, sizes = (*op.operand_shapes, *op.result_shapes), (*op.operand_sizes, *op.result_sizes)
    nbytes = [math.prod(shape) * size / parts for shape, size in zip(shapes, sizes, strict=True)]
    split = len(op.operand_shapes)
    moved = moved_nbytes(op, nbytes[:split], nbytes[split:], rule.saves_nbytes / parts)
    flops = rule.flops, 2 * rule.flops if rule.backward_flops is None else rule.backward_flops
    is_product = rule.product is not None
    if rule.product is not None:  # a bias is not counted, and each gradient's product moves what forward's does
        factors = [nbytes[rule.product.left], nbytes[rule.product.right], *nbytes[split:]]
        both = op.operand_grads[rule.product.left] + op.operand_grads[rule.product.right]
        moved = sum(factors), both * sum(factors)
    kind = {"products": is_product, "attention": rule.is_attention}
    forward, backward = (rates.least(f / parts, n, op.dtype, **kind) for f, n in zip(flops, moved, strict=True))
    return forward, backward if op.has_backward else 0.0
