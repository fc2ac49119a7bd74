"""Which graph comes first: without recompute, which only adds seconds, but where pins ask for it."""

from autopar.lower.pinned import find_pinned
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.graph.build import Builder
from autopar.search.graph.build_recompute import RecomputeBuilder


def first_builder(program: Program, pricer: Pricer) -> type[Builder]:
    """The builder of the smallest graph whose plans may honour all pins. A graph without recompute is one of bounds
    alone where pins ask for recompute."""
    return RecomputeBuilder if find_pinned(program, pricer.config.pins).again else Builder
