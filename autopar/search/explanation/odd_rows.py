"""Which products take long for the lengths of their rows alone? Of 16-bit numbers, on a GPU (`cost_models.gemm`)."""

from dataclasses import dataclass

from autopar.plan import Plan
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class OddRows:
    """`seconds` of a step that products with rows of these lengths on a rank take, `times` what whole pieces of 16
    bytes would. name: the module of the first; count: how many ops."""

    name: str
    rows: tuple[int, ...]
    count: int
    seconds: float
    times: float

    @property
    def lost(self) -> float:
        """Seconds of a step for the lengths alone, where products are what takes the time."""
        return self.seconds * (1 - 1 / self.times)


def odd_rows(plan: Plan, program: Program, pricer: Pricer) -> tuple[OddRows, ...]:
    """The slowest first."""
    found: dict[tuple[int, ...], OddRows] = {}
    for op in program.ops:
        rows, times = pricer.odd_rows(op, plan.choices[op.name])
        if times == 1:
            continue
        price = pricer.op(op, plan.choices[op.name])
        seconds = (price.forward + price.backward) * plan.microbatches
        before = found.get(rows)
        found[rows] = OddRows(
            name=before.name if before else str(op.node.meta.get("module") or op.name),
            rows=rows,
            count=before.count + 1 if before else 1,
            seconds=seconds + (before.seconds if before else 0.0),
            times=times,
        )
    return tuple(sorted(found.values(), key=lambda odd: -odd.lost))
