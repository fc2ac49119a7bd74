"""What a user of autopar calls: `plan`, `load_plan`, `distribute`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from autopar.api.arguments import check_words, checked_numbers
from autopar.api.captures import Captures, values_of
from autopar.api.checked import Compared, check_call
from autopar.api.model_plan import ModelPlan, model_plan
from autopar.api.pinning import asked_pipelines, pins_given
from autopar.errors import ArgumentError, BatchError, InfeasibleError, PassError, SearchTimeoutError
from autopar.values.calls import call_of
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.estimate import ONE_DEVICE
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.pins import Pins
from autopar.values.plan import Plan, one_stage
from autopar.values.precision import precision_of
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

if TYPE_CHECKING:
    from autopar.lower.program import Program
    from autopar.search.costs.pricing import Pricer
    from autopar.search.timeline.weave import Overlap

RELATIVE_GAP = 0.01
RANKED = 5
"""How many plans beside the best the timeline may pick."""


def plan(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    cluster: str | Path | Cluster,
    mesh: str | tuple[int, ...] | Mesh | None = None,
    pipeline: int | Literal["auto"] | None = None,
    schedule: str = "auto",
    global_batch: int | None = None,
    microbatches: int | Literal["auto"] | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    reduce_dtype: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    memory_gb: float | None = None,
    baseline: str | None = None,
    pins: Pins | Mapping[str, Any] | str | Path | None = None,
    solver: str = "auto",
    relative_gap: float = RELATIVE_GAP,
    seconds: float | None = None,
    fold: bool = True,
    buckets: bool = True,
    flatten: bool = True,
    weave: bool = True,
    with_baselines: bool = True,
    overlap: "Overlap | None" = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ModelPlan:
    """Decide how to train `model` on a cluster.

    Args:
        model: unmodified, on any device, the meta device included; it is not changed.
        example_inputs: of one call: a mapping is keywords, a tuple positions, a tensor the only position. Shapes and
            dtypes count. (Or give `args` and `kwargs`.)
        cluster: a preset (`8xh100`, `64x8xh100`, `4xcpu`), a TOML file, or a Cluster.
        mesh: `2x2`, `data=2,model=2`, `(2, 2)` or a Mesh, or `auto` for the best; by default nodes x devices of a node.
            With pipeline ranks that of each.
        pipeline: how many pipeline ranks; with mesh `auto` by default `auto`, for the best number.
        schedule: of a pipeline: gpipe, 1f1b, interleaved-1f1b, or `auto`.
        global_batch: samples a step over all devices; by default that of the example inputs.
        microbatches: in how many parts a step runs the global batch, adding up their gradients; `auto` for the number
            that is best, as with mesh `auto` or pipeline ranks where none is given.
        optimizer: adamw, adam, sgd or sgd-momentum, or one of them with `-fused` (torch's `fused=True`).
        precision: fp32, bf16 or fp64: dtype of parameters and of what is computed; by default the model's own.
            bf16-mixed computes in bf16 on parameters that are stored and trained in fp32.
        reduce_dtype: fp32 or fp64, in which ranks sum gradients where that is wider than what is computed.
        loss_fn: `loss_fn(output, batch)`, for models that return no loss of their own.
        memory_gb: limit a device in 1e9 bytes; by default what the device has.
        baseline: ddp, fsdp, megatron or ulysses: that plan instead of the best one; with keys a configuration, as in
            `megatron:tp=8,pp=4,vpp=2,mbs=1,recompute=selective,zero=1,sp=on`.
        pins: what the plan must respect: patterns of names to placements or words, as in
            `{"*.attn.*": {"model": "heads"}, "*embed*": "replicate"}`, or a TOML or JSON file of them.
        solver: ilp (proves how good the plan is), double-recursive (at once, proves little), or auto: ilp on up to
            three mesh axes.
        relative_gap: stop searching when the plan is proved to be within this of the best.
        seconds: stop solving after these, with the best plan so far and its true gap: for all meshes and numbers of
            micro-batches together, capturing, building strategy graphs and named baselines beside.
        fold: equal blocks decide alike; without it every layer decides for itself and the plan says what folding costs.
        buckets: neighbouring parameters are gathered, and their gradients reduced, in one message.
        flatten: a bucket takes another way than its parameters alone (as one collective, in levels) where cheaper.
        weave: run two micro-batches at once, one computing while the other communicates, where that is faster.
        with_baselines: price the named baselines too.
        overlap: of the best plans take the one whose step is shortest where collectives run beside compute (which the
            runtime does not do yet); by default the one whose seconds add up to least.
        check: compare the graph with the module once, loss, gradients and state, where both model and example inputs
            have values and that takes seconds; the plan says what was compared (`plan.checked`).
        progress: told what is being done.

    Raises:
        ArgumentError, ClusterError, MeshError, BatchError: for arguments outside their domain.
        PinError: if a pin matches nothing, or says what nothing that it matches offers.
        CaptureError, NoLossError: if the model cannot be captured.
        FidelityError: if the captured graph does not compute what the module does.
        InfeasibleError: if no plan meets the memory limit, or the baseline does not apply; an ImpossiblePinError if
            none on the mesh honours the pins.
        SearchTimeoutError: if no plan was found in `seconds`.
    """
    tell, began = progress or (lambda _: None), time.process_time()
    numbers = checked_numbers(locals())
    pipeline, global_batch, microbatches = (numbers[n] for n in ("pipeline", "global_batch", "microbatches"))
    memory_gb, relative_gap, seconds = (numbers[n] for n in ("memory_gb", "relative_gap", "seconds"))
    check_words(locals())
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    from autopar.search.asked_mesh import asked_mesh
    from autopar.search.known.staged_baselines import make_configuration
    from autopar.search.planner import make_plan
    from autopar.search.search_options import SearchOptions, TimeGiven

    searched = mesh == "auto"
    decided = pins_given(pins)
    num_pipeline, own_mesh = asked_mesh(machine, mesh, pipeline, schedule, baseline, solver)
    pipelines, least = asked_pipelines(decided, pipeline if baseline is None else num_pipeline, searched)
    call = own_call = call_of(example_inputs, args, kwargs)
    call = call.with_batch(global_batch) if global_batch is not None else call
    if call.batch() == 0:
        raise BatchError("the example inputs have no samples; give inputs with one or more along their first dim")
    if baseline is not None:
        from autopar.search.known.named_configuration import configured

        own_mesh, microbatches = configured(baseline, machine, own_mesh, mesh is not None, call.batch(), microbatches)
    elif microbatches is None:
        microbatches = "auto" if searched or num_pipeline > 1 else 1
    config = TrainConfig(
        optimizer=optimizer,
        precision=precision or precision_of(model),
        memory_nbytes=None if memory_gb is None else memory_gb * 1e9,
        reduce_dtype=reduce_dtype,
        pins=decided,
    )
    compared = Compared("not compared with the module, as was asked")
    if check:
        compared = check_call(model, own_call, loss_fn, tell=tell)
    turns = compared.turns
    tell("capturing the model")

    options = SearchOptions(
        relative_gap=relative_gap,
        seconds=seconds,
        fold=fold,
        solver=solver,
        buckets=buckets,
        flatten=flatten,
        with_baselines=with_baselines,
        tell=tell,
    )
    given = TimeGiven(seconds)
    first = replace(options, with_baselines=with_baselines and not buckets)  # in buckets they are compared afterwards

    def planned(captured: CapturedModel) -> Plan:
        try:
            if baseline is not None:
                tell(f"making the {baseline} plan")
                return make_configuration(baseline, captured, machine, own_mesh, config)
            return one_stage(make_plan(captured, machine, own_mesh, config, replace(first, seconds=given.left())))
        except SearchTimeoutError as error:
            raise out_of_time(error, seconds) from error
        except ArgumentError as error:
            if microbatches != "auto":
                raise
            raise InfeasibleError(str(error)) from error  # a schedule may not run so many; others are tried

    known = compared.known
    if known is not None and (call is not own_call or config.precision != precision_of(model)):
        known = None
    captures = Captures(model=model, call=call, precision=config.precision, loss_fn=loss_fn, turns=turns, known=known)

    from autopar.lower.program import make_program
    from autopar.search.costs.pricing import make_pricer

    def bucketed(found: Plan, program: "Program", pricer: "Pricer | None" = None) -> Plan:
        if not buckets:
            return found
        from autopar.search.in_buckets import best_in_buckets
        from autopar.search.timeline.named_in_buckets import configuration_in_buckets
        from autopar.search.timeline.staged_buckets import in_buckets

        if found.num_stages > 1:
            tell("choosing buckets")
            return in_buckets(found, program.captured, machine, flatten=flatten)
        if baseline is not None:
            tell("choosing buckets")
            return one_stage(configuration_in_buckets(found.single, baseline, program, machine, flatten=flatten))
        spent = time.process_time() - began
        pricer = pricer or make_pricer(mesh=found.mesh, cluster=machine, config=config)
        own = replace(options, seconds=given.left())
        return one_stage(best_in_buckets(found.single, program, pricer, own, spent=spent, is_late=given.is_over))

    if searched or (num_pipeline > 1 and baseline is None):
        from autopar.search.joint.candidates import CandidateSpace
        from autopar.search.joint.mesh_search import search_meshes

        if microbatches != "auto" and call.batch() is not None:
            call.microbatch(microbatches)  # says which numbers divide the batch
        space = CandidateSpace(
            microbatches=None if microbatches == "auto" else microbatches,
            pipelines=pipelines,
            least_pipeline=least,
            mesh=None if searched else own_mesh,
            schedule=schedule,
        )
        try:
            found, captured = search_meshes(
                call.batch(), captures.at, machine, config, first, space, finish=bucketed, shared=captures.sharing
            )
        except SearchTimeoutError as error:
            raise out_of_time(error, seconds) from error
        call = replace(call, bare=captures.bare)
    elif microbatches == "auto":
        from autopar.search.microbatches import search_microbatches, unlimited_bound
        from autopar.search.pipeline_parts import part_of

        part = part_of(machine, num_pipeline)
        found = search_microbatches(
            call.batch(),
            captures.at,
            planned,
            lambda graph: (
                unlimited_bound(graph, part, own_mesh, config, replace(options, seconds=given.left())) / num_pipeline
            ),
            relative_gap,
            tell,
            captures.sharing,
            given.is_over,
        )
        captured, call = captures.microbatch(found.microbatches)
        found = bucketed(found, make_program(captured))
    else:
        captured, call = captures.microbatch(microbatches)
        found = bucketed(planned(captured), make_program(captured))
    if weave and baseline is None and found.num_stages == 1:
        from autopar.search.woven import best_woven

        def part_at(count: int) -> CapturedModel:
            return captures.microbatch(count)[0]

        more = part_at if microbatches == "auto" and not searched and not given.is_over() else None

        def planned_stage(part: CapturedModel) -> StagePlan:
            return planned(part).single

        woven, captured = best_woven(found.single, captured, machine, planned_stage, more, tell=tell)
        found = one_stage(woven)
    if overlap is not None:
        from autopar.search.explanation.next_best import SECONDS
        from autopar.search.overlapped import ToRank, best_overlapped

        def is_asked(one: Plan) -> bool:
            is_scheduled = schedule == "auto" or (one.num_stages > 1 and one.schedule == schedule)
            is_arranged = pipeline in (None, "auto", one.pipeline) and (searched or one.mesh.shape == own_mesh.shape)
            return is_scheduled and is_arranged

        ranked = ToRank(
            overlap=overlap,
            count=0 if baseline is not None else RANKED,
            is_asked=is_asked,
            seconds=given.left() or SECONDS,
            tell=tell,
        )
        batch = call.batch() if microbatches == "auto" else None
        found, captured = best_overlapped(found, captured, machine, ranked, batch=batch, capture=captures.at)
    if with_baselines and baseline is None and found.world > 1 and found.estimate.seconds:
        from autopar.search.one_device import one_device

        tell("pricing one device")
        others = {**found.estimate.baselines, ONE_DEVICE: one_device(captured, machine, config)}
        found = found.with_estimate(replace(found.estimate, baselines=others))
    values = values_of(captured, model)
    about = dict(captured=captured, call=call, machine=machine, loss_fn=loss_fn, values=values, checked=compared.words)
    made = model_plan(found, **about)
    if broken := made.broken_pins():
        raise PassError(f"the plan found does not honour its pins: {'; '.join(broken[:3])}")
    return made


def distribute(
    model: nn.Module,
    plan: Plan,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    check: bool = True,
    outputs: Literal["whole", "dtensor", "local"] = "whole",
    compare_every: int | None = None,
) -> nn.Module:
    """The module that trains `model` under `plan`, in each of the processes that torchrun started.

    Parameters start with the model's values (give the same on every rank; a model on the meta device is for loading a
    checkpoint). Call it with the global batch on every rank, as the model is called; it returns what the model returns.

    Args:
        plan: from `autopar.plan` or `autopar.load_plan`.
        example_inputs: of one call, for a plan saved without them, or to compare the graph with the module again.
        loss_fn: as given to `plan`, for a loaded plan of a model without a loss of its own.
        outputs: how a call returns a tensor that ranks share out: gathered on every rank (`whole`; in training where it
            is read, and a loss computed of it becomes a part of the graph instead), a DTensor, or this rank's part.
        check: where a plan was loaded and example inputs with values are given, rank 0 compares as `plan` does.
        compare_every: ranks compare what they train on (batches, optimizers) in training steps 1, 10, 100, ...; with
            this also, and parameters too, every so many steps.

    Raises:
        MeshError: if the plan's mesh has another number of ranks than there are processes.
        PlanMismatchError: if the plan is for another model.
        RankError: on every rank, if ranks disagree.
        FidelityError: if the captured graph does not compute what the module does.
    """
    from autopar.api.again import captor_of
    from autopar.runtime import distributed_module, init
    from autopar.runtime.agreement import failing_together
    from autopar.runtime.groups import check_world

    init()
    own = plan if isinstance(plan, ModelPlan) else model_plan(plan)
    if check and example_inputs is not None and own.captured is None:
        with failing_together():
            if torch.distributed.get_rank() == 0:
                check_call(model, call_of(example_inputs), loss_fn or own.loss_fn)
    with failing_together():
        check_world(own.mesh, own.pipeline, torch.distributed.get_world_size())
        bound = own.bind(model, loss_fn=loss_fn, inputs=example_inputs)
        captor = captor_of(bound, model)
    made = distributed_module(bound.graph, bound, bound.values, bare=captor.call.bare, captor=captor, outputs=outputs)
    made.compare_every(compare_every)
    return made


def out_of_time(error: SearchTimeoutError, seconds: float | None) -> SearchTimeoutError:
    """What is said where no plan was found in the time that a user gave; a part of it was the last search's."""
    if seconds is None:
        return error
    bound = f": every one takes {error.bound:.4g} s or more" if 0 < error.bound < float("inf") else ""
    said = f"no plan was found in the {seconds:g} s given{bound}; give more seconds, or more memory"
    return SearchTimeoutError(said, bound=error.bound)
