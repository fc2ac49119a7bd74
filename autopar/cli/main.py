"""The command line: its commands in groups, `plan` and `export` among them. How commands end is said in `ending`."""

import json
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.advise import advise
from autopar.cli.calibrate import calibrate
from autopar.cli.check import verify
from autopar.cli.ending import DEBUG, console_of, ended, one_answer
from autopar.cli.explain import Given, reloaded
from autopar.cli.launch import launch
from autopar.cli.look import diff, explain, report
from autopar.cli.options import check_options, given_options, make_folders, number_or_auto, overrides, pins_from
from autopar.cli.parameters import (
    OUTPUT,
    SEARCH,
    WHAT,
    Baseline,
    Batch,
    Cluster,
    Json,
    Memory,
    Mesh,
    Microbatches,
    Model,
    ModelOf,
    NoCheck,
    Optimizer,
    Pin,
    PinsOf,
    Pipeline,
    Precision,
    ReduceDtype,
    Schedule,
    Seq,
    Set,
    Solver,
    Trace,
    Trust,
    option,
)
from autopar.cli.progress import ProgressLine
from autopar.cli.simulate import simulate
from autopar.errors import ArgumentError

app = typer.Typer(
    name="autopar",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan how to train a PyTorch model on a cluster, export the plan as Python, verify it against one process.",
)


def _version(asked: bool) -> None:
    if asked:
        print(f"autopar {version('autopar')} (torch {version('torch')}, Python {platform.python_version()})")
        raise typer.Exit()


@app.callback()
def _common(
    _shown: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="say which, and end")] = (
        False
    ),
    _debug: Annotated[
        bool, typer.Option(DEBUG, help="print the whole traceback of an error; AUTOPAR_DEBUG=1 does the same")
    ] = False,
) -> None:
    """What stands before a command."""


def plan(
    model: Model,
    cluster: Cluster,
    mesh: Mesh = None,
    pipeline: Pipeline = None,
    schedule: Schedule = "auto",
    global_batch: Batch = None,
    microbatches: Microbatches = None,
    seq: Seq = None,
    precision: Precision = None,
    reduce_dtype: ReduceDtype = None,
    optimizer: Optimizer = "adamw",
    memory_gb: Memory = None,
    baseline: Baseline = None,
    pin: Pin = None,
    pins: PinsOf = None,
    solver: Solver = "auto",
    gap: Annotated[float, option(SEARCH, help="stop when proved to be within this of the best: 0.01 is 1%")] = 0.01,
    seconds: Annotated[
        float | None, option(SEARCH, help="stop solving after so many, with the best plan so far")
    ] = None,
    no_fold: Annotated[bool, option(SEARCH, "--no-fold", help="equal layers need not decide alike")] = False,
    no_buckets: Annotated[
        bool, option(SEARCH, "--no-buckets", help="every parameter is gathered and reduced alone")
    ] = False,
    no_flatten: Annotated[
        bool, option(SEARCH, "--no-flatten", help="buckets travel as their parameters would alone")
    ] = False,
    no_weave: Annotated[bool, option(SEARCH, "--no-weave", help="never two micro-batches at once")] = False,
    no_baselines: Annotated[bool, option(SEARCH, "--no-baselines", help="do not price the named baselines")] = False,
    out: Annotated[
        Path | None, option(OUTPUT, help="export into this folder; a NAME.json: write the plan alone")
    ] = None,
    trace: Trace = None,
    page: Annotated[Path | None, option(OUTPUT, "--report", help="write a page for a browser here")] = None,
    overlap: Annotated[
        bool, option(SEARCH, "--overlap", help="take the best plan if all collectives were overlapped; draw it so")
    ] = False,
    no_check: NoCheck = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Decide how to train MODEL on a cluster, and say how good that is."""
    check_options(global_batch=global_batch, seq=seq, memory_gb=memory_gb, gap=gap, seconds=seconds)
    make_folders(trace=trace, report=page)
    console = console_of(as_json)
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        from autopar.cli.plan import planned, write_plan
        from autopar.search.timeline.weave import Overlap

        beside = Overlap() if overlap else None
        source = {
            "spec": model,
            "batch": global_batch,
            "seq": seq,
            "overrides": overrides(set_),
            "precision": precision,
        }
        made = planned(
            source,
            device="meta",
            cluster=cluster,
            mesh=mesh,
            pipeline=number_or_auto(pipeline, "--pipeline"),
            schedule=schedule,
            microbatches=number_or_auto(microbatches, "--microbatches"),
            optimizer=optimizer,
            reduce_dtype=reduce_dtype,
            memory_gb=memory_gb,
            baseline=baseline,
            pins=pins_from(pin, pins),
            solver=solver,
            relative_gap=gap,
            seconds=seconds,
            fold=not no_fold,
            buckets=not no_buckets,
            flatten=not no_flatten,
            weave=not no_weave,
            with_baselines=not no_baselines,
            overlap=beside,
            check=not no_check,
            tell=tell,
        )
        if out is not None:
            write_plan(made, out)
        if trace is not None:
            made.timeline(overlap=beside).save(trace)
        if page is not None:
            tell("drawing")
            made.report(page, names=(made.origin, ""))
        if as_json:
            answer.update(json.loads(made.to_json()))
    if not as_json:
        from autopar.report.plan_text import print_plan

        print_plan(made, made.locals, made.machine, console)
        if written := [str(path) for path in (out, trace, page) if path is not None]:
            console.print(f"written to {' and '.join(written)}")


OF_SAVED = ("--out", "--model", "--trust", "--set", "--json")
"""Options of an export of a saved plan; all others say how to make one."""


def export(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="a plan.json, or a model as for autopar plan")],
    out: Annotated[Path, option(OUTPUT, help="folder to write")],
    cluster: Annotated[str | None, option(WHAT, help="for a model: as for autopar plan")] = None,
    mesh: Mesh = None,
    pipeline: Pipeline = None,
    schedule: Schedule = "auto",
    global_batch: Batch = None,
    microbatches: Microbatches = None,
    seq: Seq = None,
    precision: Precision = None,
    reduce_dtype: ReduceDtype = None,
    optimizer: Optimizer = "adamw",
    memory_gb: Memory = None,
    baseline: Baseline = None,
    pin: Pin = None,
    pins: PinsOf = None,
    no_check: NoCheck = False,
    model_of: ModelOf = None,
    trust: Trust = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Write a plan as a folder that trains by itself: plan.json, model.py, train.py."""
    from autopar.cli.plan import planned, write_plan

    check_options(global_batch=global_batch, seq=seq, memory_gb=memory_gb)
    console = console_of(as_json)
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        if model.endswith(".json") and not model.startswith("hf:"):
            if decided := [name for name in given_options(context) if name not in OF_SAVED]:
                raise ArgumentError(
                    f"{model} is a plan that was made already; leave {', '.join(decided)} out, or export a model"
                )
            made = reloaded(Path(model), Given(spec=model_of, trust=trust, overrides=overrides(set_)), "cpu")
        else:
            if cluster is None:
                raise ArgumentError("exporting a model needs --cluster (8xh100, 4xcpu, ...); a plan.json does not")
            source = {
                "spec": model, "batch": global_batch, "seq": seq, "overrides": overrides(set_), "precision": precision,
            }  # fmt: skip
            made = planned(
                source,
                device="cpu",
                cluster=cluster,
                mesh=mesh,
                pipeline=number_or_auto(pipeline, "--pipeline"),
                schedule=schedule,
                microbatches=number_or_auto(microbatches, "--microbatches"),
                optimizer=optimizer,
                reduce_dtype=reduce_dtype,
                memory_gb=memory_gb,
                baseline=baseline,
                pins=pins_from(pin, pins),
                with_baselines=False,
                check=not no_check,
                tell=tell,
            )
        write_plan(made, out)
        answer.update(
            model=made.model, out=str(out), files=sorted(file.name for file in out.iterdir() if file.is_file())
        )
    if not as_json:
        written = f"{made.model} on {made.arrangement} exported to {out}: {', '.join(answer['files'])}"
        console.print(written, soft_wrap=True)
        if made.assumed:
            console.print(f"assumed: {', '.join(made.assumed)}", soft_wrap=True)
        command = f"run it: cd {out} && torchrun --nproc-per-node {made.world} train.py"
        console.print(command, soft_wrap=True)


COMMANDS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "Decide": (plan, advise, simulate),
    "Look at a plan": (explain, diff, report),
    "Check": (verify, calibrate),
    "Run": (export, launch),
}
"""In the order and the groups of the help."""
for _group, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_group)(_command)


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    group: Any = typer.main.get_command(app)
    for command in (group, *group.commands.values()):
        for parameter in command.params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""  # typer's help says <bool> of it, as if it took a value
    sys.exit(ended(group, sys.argv[1:] if arguments is None else arguments))
