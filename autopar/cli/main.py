"""The command line: `autopar plan`, `autopar export`, `autopar verify`. How commands end is said in `ending`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.calibrate import calibrate
from autopar.cli.ending import console_of, ended, one_answer
from autopar.cli.explain import Given, compared, explained, reloaded
from autopar.cli.options import check_options, check_processes, number_or_auto, overrides
from autopar.cli.simulate import simulate
from autopar.errors import ArgumentError

app = typer.Typer(
    name="autopar",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan how to train a PyTorch model on a cluster, export the plan as Python, verify it against one process.",
)

MODEL = typer.Argument(help="file.py:function or module:function (returns model and inputs), or hf:config.json")
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="override a key of the config or a parameter of the function"),
]
Mesh = Annotated[str | None, typer.Option(help="ranks along each axis: 2x2, 8 or data=2,model=2, or auto for the best")]
Batch = Annotated[int | None, typer.Option("--global-batch", help="samples a step over all devices")]
Microbatches = Annotated[
    str | None,
    typer.Option(
        help="parts of the global batch whose gradients add up: a number or auto, the best; 1 for one given mesh"
    ),
]
Pipeline = Annotated[str | None, typer.Option(help="pipeline ranks, --mesh that of each; 1 for none; auto the best")]
Schedule = Annotated[str, typer.Option(help="of a pipeline: gpipe, 1f1b or interleaved-1f1b, or auto")]
Seq = Annotated[int | None, typer.Option("--seq", help="tokens a sample")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
ReduceDtype = Annotated[str | None, typer.Option(help="fp32 or fp64, in which ranks sum gradients")]
Optimizer = Annotated[str, typer.Option(help="adamw, adam, sgd or sgd-momentum; with -fused torch's fused=True")]
Memory = Annotated[float | None, typer.Option("--memory-gb", help="memory limit a device, in 1e9 bytes")]
Baseline = Annotated[str | None, typer.Option(help="ddp, fsdp, megatron or ulysses, with keys as in megatron:tp=8")]
Solver = Annotated[str, typer.Option(help="auto, ilp (with a proof) or double-recursive (at once)")]
Trace = Annotated[Path | None, typer.Option(help="write the step's timeline for ui.perfetto.dev here")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="do not compare the graph with the module on a few samples")]
ModelOf = Annotated[
    str | None, typer.Option("--model", help="the plan's model, as for autopar plan; with --set as then")
]
Trust = Annotated[bool, typer.Option("--trust", help="run the model that the plan's file names: its code, its --set")]
Cluster = Annotated[str, typer.Option(help="8xh100, 64x8xh100 (nodes x GPUs), 4xcpu, or a TOML file")]

app.command()(simulate)
app.command()(calibrate)


@app.command()
def plan(
    model: Annotated[str, MODEL],
    cluster: Cluster,
    mesh: Mesh = None,
    pipeline: Pipeline = None,
    schedule: Schedule = "auto",
    global_batch: Batch = None,
    microbatches: Microbatches = None,
    seq: Seq = None,
    precision: Annotated[str, typer.Option(help="bf16, bf16-mixed (fp32 weights), fp32 or fp64")] = "fp32",
    reduce_dtype: ReduceDtype = None,
    optimizer: Optimizer = "adamw",
    memory_gb: Memory = None,
    baseline: Baseline = None,
    solver: Solver = "auto",
    gap: Annotated[float, typer.Option(help="stop when proved to be within this of the best")] = 0.01,
    seconds: Annotated[float | None, typer.Option(help="stop solving after these, with the best plan so far")] = None,
    no_fold: Annotated[bool, typer.Option("--no-fold", help="every layer decides; says what folding costs")] = False,
    no_buckets: Annotated[
        bool, typer.Option("--no-buckets", help="every parameter is gathered and reduced alone")
    ] = False,
    no_flatten: Annotated[bool, typer.Option("--no-flatten", help="buckets take single parameters' ways")] = False,
    no_weave: Annotated[bool, typer.Option("--no-weave", help="one micro-batch at a time")] = False,
    no_baselines: Annotated[bool, typer.Option("--no-baselines", help="do not price the named baselines")] = False,
    out: Annotated[Path | None, typer.Option(help="export into this folder too; a name.json: the plan alone")] = None,
    trace: Trace = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="rank the best plans, and draw, with collectives beside compute")
    ] = False,
    no_check: NoCheck = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Decide how to train MODEL on a cluster, and say how good that is."""
    check_options(global_batch=global_batch, seq=seq, memory_gb=memory_gb, gap=gap, seconds=seconds)
    console = console_of(as_json)
    with one_answer(as_json) as answer, console.status("") as status:
        from autopar.cli.plan import planned, with_values
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
            progress=lambda text: status.update(text),
        )
        if out is not None and out.suffix == ".json":
            made.save(out)
        elif out is not None:
            with_values(made, source).export(out)
        if trace is not None:
            made.timeline(overlap=beside).save(trace)
        if as_json:
            answer.update(json.loads(made.to_json()))
    if not as_json:
        from autopar.report.plan_text import print_plan

        print_plan(made, made.locals, made.machine, console)
        if written := [str(path) for path in (out, trace) if path is not None]:
            console.print(f"written to {' and '.join(written)}", highlight=False)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="a plan.json, or a model as for autopar plan")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    cluster: Annotated[str | None, typer.Option(help="for a model: as for autopar plan")] = None,
    mesh: Mesh = None,
    pipeline: Pipeline = None,
    schedule: Schedule = "auto",
    global_batch: Batch = None,
    microbatches: Microbatches = None,
    seq: Seq = None,
    precision: Annotated[str, typer.Option(help="bf16, bf16-mixed (fp32 weights), fp32 or fp64")] = "fp32",
    reduce_dtype: ReduceDtype = None,
    optimizer: Optimizer = "adamw",
    memory_gb: Memory = None,
    baseline: Baseline = None,
    no_check: NoCheck = False,
    model_of: ModelOf = None,
    trust: Trust = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Write a plan as a folder that trains by itself: plan.json, model.py, train.py."""
    from autopar.cli.plan import planned

    check_options(global_batch=global_batch, seq=seq, memory_gb=memory_gb)
    console = console_of(as_json)
    with one_answer(as_json) as answer, console.status("") as status:
        if model.endswith(".json") and not model.startswith("hf:"):
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
                with_baselines=False,
                check=not no_check,
                progress=lambda text: status.update(text),
            )
        made.export(out)
        answer.update(
            model=made.model, out=str(out), files=sorted(file.name for file in out.iterdir() if file.is_file())
        )
    if not as_json:
        written = f"{made.model} on {made.arrangement} exported to {out}: {', '.join(answer['files'])}"
        console.print(written, highlight=False, soft_wrap=True)
        command = f"run it: cd {out} && torchrun --nproc-per-node {made.world} train.py"
        console.print(command, highlight=False, soft_wrap=True)


@app.command()
def verify(
    model: Annotated[str, MODEL],
    mesh: Annotated[
        str | None, typer.Option(help="ranks along each axis; each rank is a process of this machine")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="a plan.json to verify")] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="a named baseline to verify; may be given several times")
    ] = None,
    random: Annotated[int, typer.Option(help="this many random valid plans")] = 0,
    pipeline: Annotated[
        str | None, typer.Option(help="random plans in stages, --mesh that of each: 1f1b:4, interleaved-1f1b:2:6")
    ] = None,
    seed: Annotated[int, typer.Option(help="of random plans")] = 0,
    global_batch: Batch = None,
    microbatches: Annotated[
        int | None, typer.Option(help="parts of the global batch whose gradients add up; by default the plan's, or 1")
    ] = None,
    weave: Annotated[bool, typer.Option("--weave", help="two micro-batches at once")] = False,
    seq: Seq = None,
    precision: Annotated[str, typer.Option(help="fp64, fp32, fp32-mixed (fp64 weights), bf16 or bf16-mixed")] = "fp64",
    device: Annotated[str, typer.Option(help="cpu, or cuda: this machine's GPUs, shared if there are too few")] = "cpu",
    trust: Annotated[bool, typer.Option("--trust", help="take --set from the plan's file too")] = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Run plans on processes of this machine and compare loss, gradients and bytes sent with one process."""
    from autopar.cli.verify import VerifyRequest, run

    check_processes(mesh)
    check_options(random=random, seed=seed, global_batch=global_batch, microbatches=microbatches, seq=seq)
    console = console_of(as_json)
    request = VerifyRequest(
        spec=model,
        mesh=mesh,
        plan=plan,
        baselines=tuple(baseline or ()),
        num_random=random,
        pipeline=pipeline,
        seed=seed,
        batch=global_batch,
        microbatches=microbatches,
        weave=weave,
        seq=seq,
        precision=precision,
        device=device,
        trust=trust,
        overrides=overrides(set_),
    )
    with one_answer(as_json) as answer:
        result = run(request, console)
        answer.update(result)
    if not result["passed"]:
        raise typer.Exit(1)


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="a plan.json that autopar plan wrote")],
    cluster: Annotated[str | None, typer.Option(help="the plan's cluster file, if it is no preset")] = None,
    seconds: Annotated[float, typer.Option(help="ask no more after these seconds of solving")] = 60.0,
    trace: Trace = None,
    model: ModelOf = None,
    trust: Trust = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say what binds a plan, what more memory or faster links would buy, which plans were near, where all goes."""
    check_options(seconds=seconds)
    console = console_of(as_json)
    with one_answer(as_json) as answer, console.status("") as status:
        given = Given(spec=model, trust=trust, overrides=overrides(set_))
        explanation = explained(plan, cluster, seconds, given, lambda text: status.update(text), trace)
        answer.update(explanation.to_json())
    if not as_json:
        console.print(str(explanation), highlight=False, markup=False, soft_wrap=True)


@app.command()
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
    with one_answer(as_json) as answer, console.status("") as status:
        given = Given(spec=model, trust=trust, overrides=overrides(set_))
        difference = compared(first, second, given, lambda text: status.update(text))
        answer.update(difference.to_json())
    if not as_json:
        console.print(str(difference), highlight=False, markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    sys.exit(ended(typer.main.get_command(app), sys.argv[1:] if arguments is None else arguments))
