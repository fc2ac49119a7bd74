"""How much more of a start does a plan in buckets pay than its parameters' shares count? By kind of message.

Of parameters that are sent in many ways each bucket pays a whole start, and shares add up to less. Searched again with
shares as large as the plan at hand paid, ways that few take are as dear as they are, and a plan of fewer ways may be
found: dynamic slope scaling (Kim and Pardalos 1999, Operations Research Letters 24).
"""

from collections import defaultdict
from collections.abc import Mapping

from autopar.plan import Plan
from autopar.search.costs.fused import find_fused, fused_messages
from autopar.search.costs.journeys import make_journeys, sent_by
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program

Kind = tuple[str, tuple[int, ...]]
"""A collective, and the mesh axes that it joins."""


def starts_paid(plan: Plan, program: Program, pricer: Pricer) -> Mapping[Kind, float]:
    """How many starts the plan pays for each that its shares count; pricer: in buckets."""
    journeys = make_journeys(program, plan, pricer)
    fused = find_fused(plan, journeys)
    paid: dict[Kind, float] = defaultdict(float)
    shares: dict[Kind, float] = defaultdict(float)
    for group in dict.fromkeys(fused.values()):
        own = sum(pricer.share(journeys[name].tensor, plan.lifetimes.get(name, "")) for name, _ in group.values)
        for backward in (False, True):
            for message in fused_messages(group, plan, journeys, backward=backward):
                paid[message.kind, message.axes] += 1
                shares[message.kind, message.axes] += own
    for name, journey in journeys.items():
        for layout, step in journey.made.items() if journey.tensor.kind == "parameter" else ():
            if (name, layout) in fused:
                continue
            own = pricer.share(journey.tensor, plan.lifetimes.get(name, ""))
            sent = sent_by(step, journey.tensor, plan)
            for message in (*sent[0], *(sent[1] if layout in journey.in_backward else ())):
                paid[message.kind, message.axes] += 1
                shares[message.kind, message.axes] += own
    return {kind: count / shares[kind] for kind, count in paid.items() if shares[kind] > 0}
