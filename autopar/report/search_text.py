"""What was searched beside one mesh, and which alternatives came near, in two lines."""

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
    return text + (f"\nnearest: {'; '.join(near)}" if near else "")
