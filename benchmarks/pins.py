"""Are pins honoured exactly, is a bound still proved, and does no pin cost less than nothing?

    python -m benchmarks.pins [--sets 30] [--families llama,t5] [--seed 0] [--markdown docs/results/pins.md]

Random sets of pins on the tiny models of tests/zoo.py, meshes 4 and 2x2 in turn, fast links. Of each: the plan found is
read against the pins; its gap; and what the pins cost together: the step beside the best plan of the same space
without them. Exit code 1 if any pin is broken, a gap is above the one asked for, or a cost below zero by more than it.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from autopar.errors import InfeasibleError
from autopar.lower.pinned import find_pinned, violations
from autopar.lower.program import Program, make_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.explanation.pin_costs import lifted_pins
from autopar.search.planner import plan_program
from autopar.search.search_options import SearchOptions
from autopar.values.mesh import parse_mesh
from autopar.values.pins import Pins
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.random_pins import pinned_pricer, random_pins
from tests.search_cases import machine
from tests.zoo import FAMILIES
from tests.zoo_graphs import zoo_graph

MESHES = ("4", "2x2")
GAP = 1e-3
OPTIONS = SearchOptions(relative_gap=GAP, with_baselines=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRow:
    """One set. broken: pins that the plan does not honour; free: seconds of the best plan without pins."""

    family: str
    mesh: str
    pins: Pins
    broken: int
    seconds: float
    bound: float
    free: float
    free_bound: float
    cpu_seconds: float

    @property
    def gap(self) -> float:
        return (self.seconds - self.bound) / self.seconds

    @property
    def cost(self) -> float:
        return (self.seconds - self.free) / self.free

    @property
    def is_wrong(self) -> bool:
        return self.broken > 0 or self.gap > GAP or self.free_bound > self.seconds


def planned(program: Program, pricer: Pricer, config: TrainConfig) -> StagePlan:
    """The best plan under a configuration."""
    return plan_program(program, make_pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=config), OPTIONS)


def rows(families: Sequence[str], sets: int, seed: int, console: Console) -> Iterator[PinnedRow | str]:
    """A row a set that some plan honours; else why none does."""
    rng = random.Random(seed)
    programs = {family: make_program(zoo_graph(family)) for family in families}
    found = 0
    while found < sets:
        family, mesh = families[found % len(families)], MESHES[found // len(families) % len(MESHES)]
        program = programs[family]
        pricer = make_pricer(mesh=parse_mesh(mesh), cluster=machine(), config=TrainConfig())
        pins = random_pins(program, pricer, rng)
        console.print(f"{family} {mesh}: {'; '.join(pins.texts)}", highlight=False, markup=False)
        began = time.process_time()
        own = pinned_pricer(pricer, pins)
        try:
            plan = planned(program, own, own.config)
        except InfeasibleError as error:
            yield f"{family} {mesh}: {'; '.join(pins.texts)}: {error}"
            continue
        free = planned(program, own, [*lifted_pins(own.config)][-1][1])
        found += 1
        yield PinnedRow(
            family=family,
            mesh=mesh,
            pins=pins,
            broken=len(list(violations(find_pinned(program, pins), [plan]))),
            seconds=plan.estimate.in_turn_seconds,
            bound=plan.estimate.bound,
            free=free.estimate.in_turn_seconds,
            free_bound=free.estimate.bound,
            cpu_seconds=time.process_time() - began,
        )


def table(found: Sequence[PinnedRow]) -> str:
    """Rows as Markdown."""
    lines = ["| model | mesh | pins | broken | gap | they cost | CPU s |", "|---|---|---|---:|---:|---:|---:|"]
    for row in found:
        said = "; ".join(f"`{text}`" for text in row.pins.texts).replace("|", "\\|")
        lines.append(
            f"| {row.family} | `{row.mesh}` | {said} | {row.broken} | {row.gap:.1e} | {row.cost:.1%} | "
            f"{row.cpu_seconds:.1f} |"
        )
    return "\n".join(lines)


PAGE = """# Pins: honoured, proved, and what they cost

`python -m benchmarks.pins {options}`: sets of pins at random on the tiny models of
`tests/zoo.py`, on four CPUs with fast links. *broken*: pins that the plan found does not honour. *gap*: between the
plan's step and the proved bound, 0.001 asked for. *they cost*: the step beside that of the best plan of the same space
without the pins. CPU seconds are those of both searches. How to use them: [pin a plan](../how-to/pin-a-plan.md).

{count} sets: {broken} pins broken, largest gap {gap:.1e}, smallest cost {cost:.1%}. {refused} more were drawn that no
plan honours as a whole, and were refused.

{table}
"""


def page(found: Sequence[PinnedRow], refused: int, options: str) -> str:
    """The page of results."""
    return PAGE.format(
        options=options,
        count=len(found),
        broken=sum(row.broken for row in found),
        gap=max(row.gap for row in found),
        cost=min(row.cost for row in found),
        refused=refused,
        table=table(found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=30)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    console = Console(width=160)
    made: list[PinnedRow] = []
    refused: list[str] = []
    for row in rows(given.families.split(","), given.sets, given.seed, console):
        if isinstance(row, str):
            refused.append(row)
            console.print(f"    none: {row}", highlight=False, markup=False)
            continue
        made.append(row)
        said = f"gap {row.gap:.1e}, cost {row.cost:+.2%}, {row.cpu_seconds:.1f} s"
        console.print(f"    broken {row.broken}, {said}{' WRONG' if row.is_wrong else ''}", highlight=False)
    wrong = [row for row in made if row.is_wrong]
    least = min(row.cost for row in made)
    console.print(
        f"{len(made)} sets: {sum(row.broken for row in made)} pins broken, largest gap "
        f"{max(row.gap for row in made):.1e}, least cost {least:+.1e}; {len(refused)} sets drawn that no plan honours"
    )
    if given.markdown is not None:
        options = f"--sets {given.sets} --seed {given.seed} --markdown {given.markdown}"
        given.markdown.write_text(page(made, len(refused), options))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
