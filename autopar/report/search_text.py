"""What was searched beside one mesh, which alternatives came near, and what the timeline picked, a line or two each."""

from autopar.report.units import seconds_text
from autopar.values.search_report import SpaceSearched, TimelineRanking

SHOWN = 3


def space_text(space: SpaceSearched) -> str:
    """Which problems were searched, and which of them are near."""
    left_out = space.candidates - space.planned
    text = (
        f"searched: {space.space}: {space.candidates} problems in {space.seconds:.1f} s ({space.status}): "
        f"{space.planned} planned, {space.do_not_fit} of them do not fit; {left_out} not better by their bounds"
    )
    near = [f"{name} {seconds_text(seconds)}" for name, seconds in space.near.items()][:SHOWN]
    near += [f"{name} at least {seconds_text(bound)}" for name, bound in space.not_below.items()][: SHOWN - len(near)]
    text += f"\nnearest: {'; '.join(near)}" if near else ""
    if least := space.in_turn:
        text += (
            f"\n{least.plan} takes the least if nothing runs beside compute, "
            f"{seconds_text(least.in_turn_seconds)}, but as it runs {seconds_text(least.step_seconds)}"
        )
    return text


def one_microbatch_text(why: str) -> str:
    """Why a step has to be one micro-batch."""
    return f"one micro-batch: the batch cannot be split, for {why}"


def timeline_text(ranked: TimelineRanking) -> str:
    """Which of the plans that the timeline ranked is taken."""
    plans, chosen = ranked.plans, ranked.chosen
    own = plans[chosen]
    text = f"collectives beside compute, the step would take {seconds_text(own.timeline_seconds)}"
    if len(plans) == 1:
        return text
    if not chosen:
        return f"{text}, the least of the {len(plans)} best plans, as by the sum"
    first = plans[0]
    times = f"{seconds_text(first.sum_seconds)}, overlapped {seconds_text(first.timeline_seconds)}"
    return (
        f"{text}, the least of the {len(plans)} best plans: this is {own.plan}; the first by the sum, which is what "
        f"the bound is of, takes {times}"
    )
