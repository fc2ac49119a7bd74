"""Which products take long for the lengths of their rows alone? Of 16-bit numbers, on a GPU (`cost_models.gemm`)."""

from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.values.explanation import OddRows
from autopar.values.stage_plan import StagePlan

NOISE = 1e-6
"""Part of an op's seconds below which a difference is none."""


def odd_rows(plan: StagePlan, program: Program, pricer: Pricer) -> tuple[OddRows, ...]:
    """Those that padding would save most of first."""
    found: dict[tuple[int, ...], OddRows] = {}
    for op in program.ops:
        if op.rule.product is None:
            continue
        names = plan.choices[op.name]
        rows, padded = pricer.padded_seconds(op, names)
        price = pricer.op(op, names)
        if price.forward + price.backward <= padded * (1 + NOISE):
            continue
        before = found.get(rows)
        found[rows] = OddRows(
            name=before.name if before else op.module or op.name,
            rows=rows,
            count=before.count + 1 if before else 1,
            seconds=(price.forward + price.backward) * plan.microbatches + (before.seconds if before else 0.0),
            padded=padded * plan.microbatches + (before.padded if before else 0.0),
        )
    return tuple(sorted(found.values(), key=lambda odd: -odd.lost))
