"""Which ops make attention's scores and weights? Those that selective recompute runs again (Korthikanti et al. 2022).

From every softmax backwards to the product of queries and keys, and forwards to that with the values: the products
without parameters nearest to it, and all ops between. Those keep what grows with the square of the sequence and cost
little. A fused kernel has no such ops; a router's softmax stands between no two such products.
"""

from collections.abc import Callable

from autopar.lower.program import Program
from autopar.values.graph import target_name


def attention_core(program: Program) -> frozenset[str]:
    """Names of the ops."""
    found: set[int] = set()
    for op in program.ops:
        if "softmax" not in target_name(op.node.target) or "log_softmax" in target_name(op.node.target):
            continue
        before = _between(program, op.position, lambda p: _sources(program, p))
        after = _between(program, op.position, lambda p: _readers(program, p))
        if before and after:
            found |= before | after
    return frozenset(program.ops[position].name for position in found)


def _between(program: Program, start: int, around: Callable[[int], set[int]]) -> set[int]:
    """Ops on ways from `start` to the nearest products without parameters, both ends included; empty if there are
    none. A way ends without one at an op that reads a parameter, and at the graph's."""
    ways: dict[int, bool] = {}

    def leads(position: int) -> bool:
        if position not in ways:
            op = program.ops[position]
            ways[position] = False
            if op.parameters:
                return False
            if op.rule.product is not None:
                ways[position] = True
            else:
                found = [leads(p) for p in sorted(around(position))]
                ways[position] = any(found)
        return ways[position]

    leads(start)
    return {position for position, is_on in ways.items() if is_on}


def _sources(program: Program, position: int) -> set[int]:
    tensors = (program.tensors[name] for name in program.ops[position].operands)
    return {t.producer for t in tensors if t.producer is not None and t.requires_grad}


def _readers(program: Program, position: int) -> set[int]:
    results = (r for r in program.ops[position].results if r is not None)
    return {p for r in results for p, _ in program.readers[r]}
