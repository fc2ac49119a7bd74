"""`autopar verify`: plans on processes of this machine, against one process. The work is `verify.run`'s."""

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.ending import console_of, one_answer
from autopar.cli.options import check_options, check_processes, overrides, pins_from
from autopar.cli.parameters import FILE, LAYOUT, MACHINE, PLANS, WHAT, Batch, Json, Model, Pin, PinsOf, Seq, Set, option
from autopar.cli.progress import ProgressLine


def verify(
    model: Model,
    mesh: Annotated[
        str | None, option(LAYOUT, help="ranks along each axis; each rank is a process of this machine")
    ] = None,
    plan: Annotated[Path | None, option(PLANS, help="a plan.json to verify")] = None,
    baseline: Annotated[
        list[str] | None,
        option(PLANS, metavar="NAME", help="ddp, fsdp, megatron or ulysses, with keys; may be given several times"),
    ] = None,
    random: Annotated[int, option(PLANS, help="so many random plans")] = 0,
    pipeline: Annotated[
        str | None, option(PLANS, help="random plans in stages, --mesh that of each: 1f1b:4, interleaved-1f1b:2:6")
    ] = None,
    seed: Annotated[int, option(PLANS, help="of random plans")] = 0,
    pin: Pin = None,
    pins: PinsOf = None,
    global_batch: Batch = None,
    microbatches: Annotated[
        int | None, option(LAYOUT, help="parts of the global batch whose gradients add up; by default the plan's, or 1")
    ] = None,
    weave: Annotated[bool, option(LAYOUT, "--weave", help="two micro-batches at once")] = False,
    seq: Seq = None,
    precision: Annotated[str, option(WHAT, help="fp64, fp32, fp32-mixed (fp64 weights), bf16 or bf16-mixed")] = "fp64",
    device: Annotated[
        str, option(MACHINE, help="cpu, or cuda: this machine's GPUs, shared if there are too few")
    ] = "cpu",
    trust: Annotated[bool, option(FILE, "--trust", help="take --set from the plan's file too")] = False,
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
        pins=pins_from(pin, pins),
        batch=global_batch,
        microbatches=microbatches,
        weave=weave,
        seq=seq,
        precision=precision,
        device=device,
        trust=trust,
        overrides=overrides(set_),
    )
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        result = run(request, console, tell)
        answer.update(result)
    if not result["passed"]:
        raise typer.Exit(1)
