"""What was searched beside one mesh, which alternatives came near, and what the timeline picked, a line or two each."""

from collections.abc import Mapping
from typing import Any

from autopar.report.units import seconds_text

SHOWN = 3


def search_text(facts: Mapping[str, Any]) -> str:
    """`facts`: what `search.joint` notes in `estimate.solver["search"]`."""
    left_out = facts["candidates"] - facts["planned"]
    text = (
        f"searched: {facts['space']}: {facts['candidates']} problems in {facts['seconds']:.1f} s ({facts['status']}): "
        f"{facts['planned']} planned, {facts['do_not_fit']} of them do not fit; {left_out} not better by their bounds"
    )
    near = [f"{name} {seconds_text(seconds)}" for name, seconds in facts["near"].items()][:SHOWN]
    near += [f"{name} at least {seconds_text(bound)}" for name, bound in facts["not_below"].items()][
        : SHOWN - len(near)
    ]
    text += f"\nnearest: {'; '.join(near)}" if near else ""
    if least := facts.get("in_turn"):
        text += (
            f"\n{least['plan']} takes the least if nothing runs beside compute, "
            f"{seconds_text(least['in_turn_seconds'])}, but as it runs {seconds_text(least['step_seconds'])}"
        )
    return text


def one_microbatch_text(why: str) -> str:
    """`why`: what `search.microbatches` notes in `estimate.solver["one_microbatch"]`."""
    return f"one micro-batch: the batch cannot be split, for {why}"


def timeline_text(facts: Mapping[str, Any]) -> str:
    """`facts`: what `search.overlapped` notes in `estimate.solver["timeline"]`."""
    plans, chosen = facts["plans"], facts["chosen"]
    own = plans[chosen]
    text = f"collectives beside compute, the step would take {seconds_text(own['timeline_seconds'])}"
    if len(plans) == 1:
        return text
    if not chosen:
        return f"{text}, the least of the {len(plans)} best plans, as by the sum"
    first = plans[0]
    times = f"{seconds_text(first['sum_seconds'])}, overlapped {seconds_text(first['timeline_seconds'])}"
    return (
        f"{text}, the least of the {len(plans)} best plans: this is {own['plan']}; the first by the sum, which is what "
        f"the bound is of, takes {times}"
    )
