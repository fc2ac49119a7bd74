"""`autopar verify`: which plans, on which model, and a table that grows a row a plan."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from autopar.api.captures import captured_model, values_of
from autopar.api.checked import run_before
from autopar.api.model_plan import ModelPlan, load_plan
from autopar.api.pinning import asked_pipelines
from autopar.cli.repoint import repointed
from autopar.errors import ArgumentError, FidelityError, InfeasibleError, MeshError, PlanMismatchError
from autopar.models import LoadedModel, load_model
from autopar.oracle import Subject, Tolerance, TrainedStep, check_module
from autopar.passes.promote_casts import promote_casts, promoted_eager
from autopar.report.units import nbytes_text
from autopar.search.known.named_configuration import configured, parse_configuration
from autopar.search.known.staged_baselines import make_configuration
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.calls import Call
from autopar.values.choices import check_choice
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import Mesh, parse_mesh
from autopar.values.pins import NO_PINS, Pins
from autopar.values.plan import Plan, one_stage
from autopar.values.precision import PRECISIONS, computed_copy
from autopar.values.schedules import parse_pipeline
from autopar.values.train_config import TrainConfig
from autopar.verification import DEVICES, PEAK_TOLERANCE, TOLERANCES, PlanCheck, draws, verify_plans

STEPS = 3
"""Steps that are compared, each on other samples; state is carried on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """What the command line asked for."""

    spec: str
    mesh: str | None = None
    plan: Path | None = None
    baselines: tuple[str, ...] = ()
    num_random: int = 0
    pipeline: str | None = None
    seed: int = 0
    pins: Pins = NO_PINS
    batch: int | None = None
    microbatches: int | None = None
    weave: bool = False
    seq: int | None = None
    precision: str = "fp64"
    device: str = "cpu"
    trust: bool = False
    overrides: dict[str, str] | None = None


def run(request: VerifyRequest, console: Console, tell: Callable[[str], None]) -> dict[str, Any]:
    """Verify, printing rows as plans finish; the result as JSON values, `passed` among them. `tell`: progress.

    Raises:
        AutoparError: for bad input; RankError if a process dies.
    """
    check_choice("precision", request.precision, PRECISIONS)
    check_choice("device", request.device, DEVICES)
    if request.pipeline is not None and (not request.num_random or request.plan or request.baselines):
        raise ArgumentError("--pipeline 1f1b:4 is for random plans alone: give --random N and no plan or baseline")
    if request.pins and (request.plan is not None or request.num_random):
        raise ArgumentError("--pin is for the best plan and for baselines: a saved plan has its own, a random one none")
    for number in [parse_configuration(name).pp for name in request.baselines] or [1]:
        asked_pipelines(request.pins, number, searched=False)
    if request.weave and (request.plan is not None or request.pipeline is not None):
        raise ArgumentError("--weave is for baselines and random plans without stages: a saved plan says itself")
    saved = load_plan(request.plan) if request.plan is not None else None
    mesh = _mesh(request, saved)
    request = request if saved is None else _as_planned(request, saved)
    tell("building the model")
    loaded = _loaded(request, request.precision)
    if loaded.assumed:
        console.print(f"assumed: {', '.join(loaded.assumed)}", soft_wrap=True)
    call = Call(args=loaded.args, kwargs=loaded.kwargs)
    request = _as_configured(request, mesh, call)
    run_before(loaded.model, call)
    tell("capturing the model")
    captured = _captured(request, loaded.model, call, request.microbatches or 1)
    reference = _captured(request, loaded.model, call, 1) if captured.microbatches > 1 else captured
    tell("making the plans")
    found = _plans(request, captured, mesh, saved, loaded.model, console)
    plans = {label: _woven(plan) if request.weave else plan for label, plan in found}
    if len({plan.world for plan in plans.values()}) > 1:
        said = ", ".join(f"{label} on {plan.world}" for label, plan in plans.items())
        raise ArgumentError(f"plans on different numbers of processes: {said}; verify them one by one")
    if not plans:
        return _result(request, mesh, [], console)
    precision = PRECISIONS[request.precision]
    own = computed_copy(loaded.model, precision) if precision.is_mixed else loaded.model
    subject = Subject(model=own, captured=reference, args=call.args, kwargs=call.kwargs)
    tell(f"running {STEPS} steps of the module and of its graph on one process")
    try:
        steps, is_exact = module_steps_checked(subject, request.precision, console)
    except FidelityError as error:
        console.print(f"NOT the module: {error}", style="red", soft_wrap=True)
        return {"model": request.spec, "passed": False, "difference": str(error), "plans": []}
    inputs = [bind_inputs(captured.inputs, args, kwargs) for args, kwargs in subject.calls(STEPS)]
    checks: list[PlanCheck] = []
    labels, world = list(plans), next(iter(plans.values())).world

    def tell_next() -> None:
        if len(checks) < len(labels):
            tell(f"plan {len(checks) + 1} of {len(labels)} ({labels[len(checks)]}) on {world} processes")

    tell_next()
    console.print(HEAD, style="bold", soft_wrap=True)
    for check in verify_plans(
        captured,
        values_of(captured, loaded.model),
        inputs,
        plans,
        wanted=steps if is_exact and request.device == "cpu" else None,
        reference=reference,
        device=request.device,
    ):
        checks.append(check)
        _print_row(check, request.precision, console)
        tell_next()
    return _result(request, mesh, checks, console)


def module_steps_checked(subject: Subject, precision: str, console: Console) -> tuple[tuple[TrainedStep, ...], bool]:
    """What the module itself does in each step, equal to the graph on one process; and whether ranks can be compared
    with that. They draw other random numbers than the module, which the graph alone can draw as they do.

    Raises:
        FidelityError: if module and graph differ.
    """
    loss, gradient = TOLERANCES[precision]
    context = promoted_eager if precision == "fp64" else nullcontext
    checked = check_module(subject, STEPS, Tolerance(loss=loss, gradient=gradient), context)
    worst = max((d.error for d in checked.differences), default=0.0)
    is_exact = not draws(subject.captured) and not PRECISIONS[precision].is_mixed
    with_what = "the module" if is_exact else "the graph, which draws their numbers or casts as they do,"
    console.print(
        f"graph and module, {STEPS} steps in {precision}: loss, gradients and state differ by at most {worst:.0e} "
        f"(relative); plans are compared with {with_what} in each",
        soft_wrap=True,
    )
    return checked.steps, is_exact


def _loaded(request: VerifyRequest, precision: str) -> LoadedModel:
    return load_model(
        request.spec,
        batch=request.batch,
        seq=request.seq,
        precision=precision,
        overrides=request.overrides,
        device="cpu",
    )


def _captured(request: VerifyRequest, model: nn.Module, call: Call, microbatches: int) -> CapturedModel:
    captured, _ = captured_model(model, call, request.precision, microbatches=microbatches)
    return promote_casts(captured) if request.precision == "fp64" else captured


def _as_planned(request: VerifyRequest, saved: ModelPlan) -> VerifyRequest:
    """The batch and sequence length that a saved plan was made for, where the command line is silent; and its
    overrides, which become arguments of the model's code, where the file is trusted."""
    source = saved.source or {}
    own = source.get("overrides", {}) if request.trust else {}
    if missing := source.get("overrides", {}).keys() - own.keys() - (request.overrides or {}).keys():
        sets = " ".join(f"--set {key}={source['overrides'][key]}" for key in sorted(missing))
        raise PlanMismatchError(
            f"{request.plan} was made with {sets!r}, which a file does not say for you; give it too, or --trust"
        )
    batch = saved.call.batch() if saved.call is not None else None
    if request.microbatches not in (None, saved.microbatches):
        raise ArgumentError(
            f"the plan runs {saved.microbatches} micro-batches a step, --microbatches says {request.microbatches}; "
            "leave --microbatches out or plan again"
        )
    return replace(
        request,
        microbatches=saved.microbatches,
        batch=request.batch or source.get("batch") or batch,
        seq=request.seq or source.get("seq"),
        overrides={**own, **(request.overrides or {})},
    )


def _as_configured(request: VerifyRequest, mesh: Mesh, call: Call) -> VerifyRequest:
    """The number of micro-batches that the named configurations say."""
    asked = request.microbatches or 1
    counts = {n: configured(n, _machine(n, mesh), mesh, True, call.batch(), asked)[1] for n in request.baselines}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ArgumentError(f"baselines of different numbers of micro-batches: {said}; verify them one by one")
    return replace(request, microbatches=int(next(iter(counts.values())))) if counts else request


def _machine(baseline: str, mesh: Mesh) -> Cluster:
    """As many CPU processes as a named configuration has ranks, `mesh` on each of its pipeline ranks."""
    return load_cluster(f"{parse_configuration(baseline).pp * mesh.size}xcpu")


def _mesh(request: VerifyRequest, saved: Plan | None) -> Mesh:
    if request.mesh is None:
        if saved is None:
            raise ArgumentError("verify needs --mesh (2x2, 4, ...) or --plan plan.json")
        return saved.mesh
    mesh = parse_mesh(request.mesh)
    if saved is not None and saved.mesh.shape != mesh.shape:
        raise MeshError(f"the plan is for mesh {saved.mesh}, --mesh says {mesh}; leave --mesh out or plan again")
    return mesh


def _plans(
    request: VerifyRequest,
    captured: CapturedModel,
    mesh: Mesh,
    saved: ModelPlan | None,
    model: nn.Module,
    console: Console,
) -> Iterator[tuple[str, Plan]]:
    """The plans asked for, each with its label; the best plan found if none is."""
    from autopar.search.timeline.staged_buckets import in_buckets

    config = TrainConfig(precision=request.precision, pins=request.pins)
    if saved is not None:
        own = saved.config.precision
        yield "plan", repointed(saved, captured, model, request.precision, lambda: _loaded(request, own).model)
    for name in request.baselines:
        try:
            machine = _machine(name, mesh)
            yield name, in_buckets(make_configuration(name, captured, machine, mesh, config), captured, machine)
        except InfeasibleError as error:
            if len(request.baselines) == 1 and not request.num_random:
                raise
            console.print(f"left out: {error}")
    if request.num_random:
        for number in range(request.num_random):
            seed = request.seed + number
            yield f"random {seed}", _random(request, captured, mesh, random.Random(seed))
    if saved is None and not request.baselines and not request.num_random:
        machine = load_cluster(f"{mesh.size}xcpu")
        options = SearchOptions(relative_gap=0.01, with_baselines=False, buckets=True)
        yield "ilp", one_stage(make_plan(captured, machine, mesh, config, options))


def _woven(plan: Plan) -> Plan:
    """The plan with two micro-batches at once."""
    if plan.num_stages > 1:
        raise ArgumentError(
            "--weave was asked of a plan with stages, which run one micro-batch at a time; leave it out"
        )
    return one_stage(replace(plan.single, copies=2))


def _random(request: VerifyRequest, captured: CapturedModel, mesh: Mesh, rng: random.Random) -> Plan:
    """A random plan, in stages cut at random if a pipeline is asked for."""
    from autopar.search.known.random_plan import random_cuts, random_plan, random_staged_plan

    if request.pipeline is None:
        return one_stage(random_plan(captured, mesh, rng))
    schedule, pipeline, num_stages = parse_pipeline(request.pipeline)
    return random_staged_plan(captured, mesh, schedule, pipeline, random_cuts(captured, num_stages, rng), rng)


NOT_CHECKED = (
    "not checked by random plans: the plan that autopar plan would choose (give --plan), seconds, the optimizer, "
    f"other sizes than these, GPUs, and training beyond {STEPS} steps"
)
HEAD = (
    f"{'plan':12} {'loss error':>11} {'gradient error':>15}  {'largest at':38} {'sent':>10} {'bytes':>9} {'peak':>10} "
    f"{'predicted':>10}  verdict"
)


def _print_row(check: PlanCheck, precision: str, console: Console) -> None:
    loss, gradient = TOLERANCES[precision]
    sent = sum(nbytes for _, nbytes in check.counted.values())
    agreed = "as said" if check.bytes_match else "DIFFER"
    wrong = check.wrong(loss, gradient)
    verdict = f"FAILED: {', '.join(wrong)}" if wrong else "ok"
    worst = check.worst_gradient if len(check.worst_gradient) <= 38 else "…" + check.worst_gradient[-37:]
    line = (
        f"{check.plan:12} {check.loss_error:11.1e} {check.gradient_error:15.1e}  {worst:38} "
        f"{nbytes_text(sent):>10} {agreed:>9} {nbytes_text(check.measured_peak):>10} "
        f"{nbytes_text(check.predicted_peak):>10}  {verdict}"
    )
    console.print(line, style="" if verdict == "ok" else "red", soft_wrap=True)
    if not check.bytes_match:
        for key in sorted({*check.predicted, *check.counted}):
            said, seen = check.predicted.get(key, (0, 0)), check.counted.get(key, (0, 0))
            if said != seen:
                console.print(
                    f"    {key[0]} over {','.join(key[1])}: predicted {said[0]} calls, {said[1]} bytes; "
                    f"sent {seen[0]} calls, {seen[1]} bytes",
                )


def _result(request: VerifyRequest, mesh: Mesh, checks: list[PlanCheck], console: Console) -> dict[str, Any]:
    loss, gradient = TOLERANCES[request.precision]
    failed = [f"{check.plan} ({', '.join(wrong)})" for check in checks if (wrong := check.wrong(loss, gradient))]
    farthest = max((check.peak_error for check in checks), key=abs, default=0.0)
    worst_loss = max((check.loss_error for check in checks), default=0.0)
    worst = max(checks, key=lambda c: c.gradient_error, default=None)
    worst_state = max((check.state_error for check in checks), default=0.0)
    passed = bool(checks) and not failed
    if worst is not None:
        _print_traffic(worst if len(checks) > 1 else checks[0], console)
        stages = f"stages {request.pipeline} of " if request.pipeline else ""
        said = "equal to one process" if passed else f"NOT as predicted or as on one process: {', '.join(failed)}"
        console.print(
            f"{len(checks)} {'plan' if len(checks) == 1 else 'plans'} on {stages}mesh {mesh}, {request.precision}, "
            f"{request.device}: "
            f"largest relative error of the loss {worst_loss:.1e} (tolerance {loss:.0e}), of a gradient "
            f"{worst.gradient_error:.1e} ({worst.worst_gradient or 'none'}, plan {worst.plan}; tolerance "
            f"{gradient:.0e}), of state after a step {worst_state:.1e} (tolerance {gradient:.0e}), "
            f"of predicted peak memory {farthest:+.1%} (tolerance {PEAK_TOLERANCE:.0%}): {said}",
            style="green" if passed else "red",
            soft_wrap=True,
        )
        if request.num_random:
            console.print(NOT_CHECKED, soft_wrap=True)
    return {
        "model": request.spec,
        "mesh": list(mesh.shape),
        "precision": request.precision,
        "device": request.device,
        "tolerance": {"loss": loss, "gradient": gradient, "peak": PEAK_TOLERANCE},
        "passed": passed,
        "loss_error": worst_loss,
        "gradient_error": worst.gradient_error if worst else 0.0,
        "state_error": worst_state,
        "peak_error": farthest,
        "plans": [_check_json(check, request.precision) for check in checks],
    }


def _print_traffic(check: PlanCheck, console: Console) -> None:
    console.print(f"bytes by collective, plan {check.plan}:")
    for key in sorted({*check.predicted, *check.counted}):
        said, seen = check.predicted.get(key, (0, 0)), check.counted.get(key, (0, 0))
        console.print(
            f"    {key[0]:15} over {','.join(key[1]):16} predicted {said[0]:5} calls {said[1]:12} bytes, "
            f"sent {seen[0]:5} calls {seen[1]:12} bytes",
            soft_wrap=True,
        )


def _check_json(check: PlanCheck, precision: str) -> dict[str, Any]:
    def sent(table: Any) -> dict[str, Any]:
        return {f"{kind} {','.join(axes)}": {"calls": c, "bytes": b} for (kind, axes), (c, b) in sorted(table.items())}

    return {
        "plan": check.plan,
        "passed": not check.wrong(*TOLERANCES[precision]),
        "loss": check.loss,
        "loss_error": check.loss_error,
        "gradient_error": check.gradient_error,
        "worst_gradient": check.worst_gradient,
        "state_error": check.state_error,
        "peak_nbytes": {"predicted": check.predicted_peak, "measured": check.measured_peak},
        "predicted": sent(check.predicted),
        "sent": sent(check.counted),
    }
