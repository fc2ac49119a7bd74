"""An explanation as text of 120 columns: what binds, what a change would buy, what was near, where all goes."""

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.report.explain_stages_text import near_table, pipeline_lines, pipeline_tables
from autopar.report.plain import plain_text
from autopar.report.search_text import one_microbatch_text
from autopar.report.tables import NOISE, columns_of, items_table, signed
from autopar.report.units import nbytes_text, seconds_text, share_text
from autopar.values.explanation import Alternative, Explanation, OddRows, Offer

WORTH = 0.01
"""Part of the step from which on odd rows are spoken of."""


def explain_text(explanation: Explanation) -> str:
    """The explanation as plain text."""
    return plain_text(render(explanation))


def render(explanation: Explanation) -> RenderableType:
    """The explanation for a rich console."""
    own, is_staged = explanation.plan.estimate, bool(explanation.stages)
    lines = [*_heading(explanation), *(pipeline_lines(explanation) if is_staged else _binds(explanation))]
    parts: list[RenderableType] = [Text("\n".join(lines) + "\n")]
    if is_staged:
        parts += pipeline_tables(explanation)
    parts.append(offers_table(explanation.offers, own.step_seconds, own.in_turn_seconds))
    if explanation.pins:
        parts.append(_pins(explanation))
    if explanation.alternatives:
        parts.append(_alternatives(explanation))
    if explanation.near or explanation.not_below or explanation.schedules:
        parts.append(near_table(explanation))
    title, at_peak = "where the seconds of a step go", "what a rank holds at the peak"
    spent, held = own.in_turn_seconds, own.peak_nbytes
    if is_staged:
        title += f" in stage {explanation.slowest}, the slowest"
        at_peak = f"what stage {explanation.slowest} holds at its peak with one micro-batch in flight"
        spent, held = (sum(item.amount for item in s) for s in (explanation.ledger.seconds, explanation.ledger.nbytes))
    title += ", everything in turn" if own.hidden else ""
    parts.append(items_table(title, explanation.ledger.seconds, spent, seconds_text))
    parts.append(items_table(f"{at_peak}, {explanation.ledger.peak}", explanation.ledger.nbytes, held, nbytes_text))
    if explanation.baselines:
        parts.append(baselines_table(explanation.baselines, own.step_seconds))
    if explanation.unanswered:
        listed = "; ".join(explanation.unanswered)
        parts.append(Text(f"not asked, for the time was over: {listed}; give --seconds more\n"))
    if command := _check(explanation):
        parts.append(Text("to check what memory would buy, plan with another limit:"))
        parts.append(Text(f"{command}\n", no_wrap=True, overflow="ignore"))  # to be pasted
    return Group(*parts)


def _check(explanation: Explanation) -> str:
    """The command that plans again with 1 GB more, if the command line made the plan."""
    plan = explanation.plan
    source = getattr(plan, "source", None)
    if not source or plan.num_stages > 1:
        return ""
    options = [
        ("--global-batch", source.get("batch")),
        ("--seq", source.get("seq")),
        ("--precision", plan.config.precision),
        ("--reduce-dtype", plan.config.reduce_dtype),
        ("--optimizer", plan.config.optimizer),
        ("--cluster", plan.cluster),
        ("--mesh", ",".join(f"{a}={n}" for a, n in zip(plan.mesh.names, plan.mesh.shape, strict=True))),
        ("--microbatches", plan.microbatches),
        ("--memory-gb", f"{explanation.limit / 1e9 + 1:.6g}"),
        *(("--pin", text) for text in plan.config.pins.texts),
        *(("--set", f"{key}={value}") for key, value in source.get("overrides", {}).items()),
    ]
    said = (word for name, value in options if value is not None for word in (name, str(value)))
    return shlex.join(["autopar", "plan", source["spec"], *said])  # texts of a file, which a person may paste


def _heading(explanation: Explanation) -> list[str]:
    plan, estimate = explanation.plan, explanation.plan.estimate
    parts = f", {plan.schedule}" if plan.num_stages > 1 else ""
    parts += f", {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
    lines = [f"{plan.model} on {plan.cluster}, {plan.arrangement}{parts} [{plan.origin}]"]
    proved = f", none takes less than {seconds_text(estimate.bound)}" if estimate.bound else ""
    beside = f"; if nothing ran beside compute {seconds_text(estimate.in_turn_seconds)}" if estimate.hidden else ""
    fullest = " of the fullest rank" if plan.num_stages > 1 else ""
    lines.append(
        f"step {seconds_text(estimate.step_seconds)}{beside}{proved}; memory{fullest} "
        f"{nbytes_text(estimate.peak_nbytes)} of {nbytes_text(explanation.limit)} a device"
    )
    if others := estimate.search.microbatches:
        said = (f"{n}: {seconds_text(v) if isinstance(v, float) else v}" for n, v in others.items())
        lines.append("micro-batches: " + "; ".join(said))
    if why := estimate.search.one_microbatch:
        lines.append(one_microbatch_text(why))
    return lines


def _odd_text(odd: OddRows) -> str:
    others = f" and {odd.count - 1} more" if odd.count > 1 else ""
    lengths = " and ".join(str(n) for n in odd.rows if n % 8)
    return (
        f"unaligned rows: {odd.name}{others} take {seconds_text(odd.seconds)} a step, {seconds_text(odd.padded)} if "
        f"rows were a multiple of 8: on a rank {lengths}; pad them, or split them otherwise"
    )


def _binds(explanation: Explanation) -> list[str]:
    """What stands between this plan and a faster one."""
    estimate, total = explanation.plan.estimate, explanation.plan.estimate.in_turn_seconds
    sent = sum(explanation.ledger.levels.values())
    shares = [f"compute {share_text(total - sent, total)}"]
    shares += [f"{name} {share_text(s, total)}" for name, s in explanation.ledger.levels.items()]
    in_turn = ", everything in turn" if estimate.hidden else ""
    lines = [f"of the step{in_turn}: {', '.join(shares)} (a collective counts for the slowest links that it crosses)"]
    lines += [_odd_text(odd) for odd in explanation.odd_rows if odd.lost > WORTH * total]
    room = explanation.limit - estimate.peak_nbytes
    if explanation.limit_costs is None:
        lines.append(f"memory: {nbytes_text(room)} are free; whether the limit binds was not asked")
        return lines
    least, most = explanation.limit_costs
    if most <= NOISE * total:
        lines.append(f"memory does not bind: {nbytes_text(room)} are free, and the best plan without a limit fits")
    else:
        binds = "binds" if least > NOISE * total else "may bind"
        lines.append(
            f"memory {binds}: {nbytes_text(room)} are free, and the limit costs {_between(least, most)} "
            f"({share_text(most, total)} of the step at most)"
        )
    return lines


def _between(least: float, most: float) -> str:
    return f"{seconds_text(least)} to {seconds_text(most)}" if least else f"at most {seconds_text(most)}"


IN_TURN = "; what is proved counts everything in turn"
"""Of tables about a plan that hides something."""


def offers_table(offers: Sequence[Offer], own: float, in_turn: float) -> Table:
    """own: seconds of the plan as it runs; in_turn: if nothing ran beside compute."""
    title = f"what a change would buy (planned again under it, all else the same{IN_TURN * (in_turn > own)})"
    table = columns_of(title, "with", "this plan", "best plan", "no plan below", "saves", "at most", folded=1)
    for offer in offers:
        same = "does not fit" if offer.same is None else seconds_text(offer.same)
        change = f"{offer.change}: {offer.why_not}" if offer.why_not else offer.change
        if offer.best is None:
            table.add_row(change, same, "", "", "", "")
            continue
        table.add_row(
            change,
            same,
            seconds_text(offer.best),
            seconds_text(offer.bound) if offer.bound else "not proved",
            signed(own - offer.best, own, ""),
            signed(in_turn - offer.bound, in_turn, "") if offer.bound else "",
        )
    return table


def _alternatives(explanation: Explanation) -> Table:
    own = explanation.plan.estimate
    title = f"plans near this one (the best without what is named, under the same limit{IN_TURN * (own.hidden > 0)})"
    table = columns_of(title, "without", "instead", "step", "more than this", "at least", "peak", folded=2)
    alike: dict[tuple[object, ...], list[Alternative]] = {}
    for other in explanation.alternatives:
        alike.setdefault((other.instead, other.seconds, other.bound, other.why_not), []).append(other)
    for others in alike.values():
        other, without = others[0], "; or ".join(other.without for other in others)
        if other.seconds is None:
            table.add_row(without, other.why_not, *[""] * 4)
            continue
        table.add_row(
            without,
            other.instead,
            seconds_text(other.seconds),
            signed(other.seconds - own.step_seconds, own.step_seconds),
            signed(other.bound - own.in_turn_seconds, own.in_turn_seconds),
            nbytes_text(other.nbytes),
        )
    return table


def _pins(explanation: Explanation) -> Table:
    """Costs are never below zero: a plan with a pin is one of those without."""
    own = explanation.plan.estimate
    title = f"what each pin costs (the best plan without it, under the same limit{IN_TURN * (own.hidden > 0)})"
    table = columns_of(title, "pin", "why not", "without it", "costs", "at most", folded=2)
    for other in explanation.pins:
        if other.seconds is None:
            table.add_row(other.without, other.why_not, *[""] * 3)
            continue
        table.add_row(
            other.without,
            other.why_not,
            seconds_text(min(other.seconds, own.step_seconds)),
            signed(max(own.step_seconds - other.seconds, 0.0), own.step_seconds),
            signed(max(own.in_turn_seconds - other.bound, 0.0), own.in_turn_seconds) if other.bound else "",
        )
    return table


def baselines_table(baselines: Mapping[str, float | str], own: float) -> Table:
    table = columns_of("what named baselines cost", "baseline", "why not", "step", "more than this", folded=2)
    for name, result in baselines.items():
        if isinstance(result, str):
            table.add_row(name, result, "", "")
        else:
            table.add_row(name, "", seconds_text(result), signed(result - own, own))
    return table
