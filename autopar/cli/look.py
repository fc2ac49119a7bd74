"""`autopar explain`, `autopar diff` and `autopar report`: a saved plan, looked at."""

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.ending import console_of, one_answer
from autopar.cli.explain import Given, compared, explained, reported
from autopar.cli.options import check_options, make_folders, overrides
from autopar.cli.parameters import FILE, OUTPUT, SEARCH, Json, ModelOf, PlanFile, Set, Trace, Trust, option
from autopar.cli.progress import ProgressLine


def explain(
    plan: PlanFile,
    cluster: Annotated[str | None, option(FILE, help="the plan's cluster file, if it is no preset")] = None,
    seconds: Annotated[float, option(SEARCH, help="ask no more after these seconds of solving")] = 60.0,
    trace: Trace = None,
    model: ModelOf = None,
    trust: Trust = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say what binds a plan, what more memory or faster links would buy, which plans were near, where all goes."""
    check_options(seconds=seconds)
    make_folders(trace=trace)
    console = console_of(as_json)
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        given = Given(spec=model, trust=trust, overrides=overrides(set_))
        explanation = explained(plan, cluster, seconds, given, tell, trace)
        answer.update(explanation.to_json())
    if not as_json:
        console.print(str(explanation), soft_wrap=True)


def diff(
    first: Annotated[Path, typer.Argument(help="a plan.json")],
    second: Annotated[Path, typer.Argument(help="another of the same model")],
    model: ModelOf = None,
    trust: Trust = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say what two plans of one model decide differently, and how seconds and bytes differ by kind."""
    console = console_of(as_json)
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        given = Given(spec=model, trust=trust, overrides=overrides(set_))
        difference = compared(first, second, given, tell)
        answer.update(difference.to_json())
    if not as_json:
        console.print(str(difference), soft_wrap=True)


def report(
    plan: PlanFile,
    out: Annotated[
        Path | None, option(OUTPUT, "--out", "-o", help="the page to write; by default the plan's name with .html")
    ] = None,
    beside: Annotated[Path | None, option(FILE, help="another plan.json of the same model, shown beside")] = None,
    cluster: Annotated[str | None, option(FILE, help="the plan's cluster file, if it is no preset")] = None,
    model: ModelOf = None,
    trust: Trust = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Write a page for a browser: the model, its shards, the step and its memory over time, bytes, bound, baselines."""
    written = plan.with_suffix(".html") if out is None else out
    make_folders(out=written)
    console = console_of(as_json)
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        given = Given(spec=model, trust=trust, overrides=overrides(set_))
        reported(plan, beside, written, cluster, given, tell)
        answer.update(out=str(written), nbytes=written.stat().st_size)
    if not as_json:
        console.print(f"written to {written}", soft_wrap=True)
