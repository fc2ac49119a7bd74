"""The distributed module: an ordinary nn.Module to its user, one rank of a plan inside.

Parameters and state-dict keys are named as in the original model. A call takes the global batch, or this rank's slice
of any of its dims; the loss it gives is that of the whole batch, the same on every rank, and `backward()` leaves on
every parameter the gradient that one process would have computed on the global batch. `train_step` does both, in the
micro-batches of the plan.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn

from autopar.errors import ArgumentError
from autopar.lower.messages import Sent
from autopar.ops.buckets import use_sink
from autopar.ops.groups import use_groups
from autopar.ops.random import use_draws
from autopar.ops.regather import regathering
from autopar.passes.call_natively import call_natively
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.prefetch import prefetch
from autopar.passes.recompute import again_graph
from autopar.passes.start_and_wait import start_and_wait
from autopar.passes.start_early import start_early
from autopar.passes.wait_late import wait_late
from autopar.passes.weave_copies import weave_copies, weave_graph
from autopar.runtime.accumulate import Accumulator, total_loss
from autopar.runtime.agreement import agree, shared_number
from autopar.runtime.data import LocalBatch, arguments_of, local_batch, local_input, split_batch
from autopar.runtime.evaluation import evaluation_graph
from autopar.runtime.groups import build_groups, flattened_axes
from autopar.runtime.launch import device as own_device
from autopar.runtime.launch import init
from autopar.runtime.optimizers import install_check
from autopar.runtime.parameters import check_names
from autopar.runtime.parts import refuse_uncalled_hooks
from autopar.runtime.reductions import Late
from autopar.runtime.state import State, all_whole
from autopar.runtime.trainable import Output, Trainable, without_values
from autopar.runtime.variant import GATHERED, Part, Variant
from autopar.runtime.variants import Asked, Captor, guards_hold
from autopar.runtime.whole import as_whole
from autopar.values.estimate import Estimate
from autopar.values.graph import Accumulation, BufferSpec, CapturedModel, InputSpec, ParameterSpec
from autopar.values.inputs import bind_inputs
from autopar.values.local_model import LocalModel
from autopar.values.outputs import Returned
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan

if TYPE_CHECKING:
    from autopar.runtime.compiled import Compiler


EAGER, WHOLE, BY_BLOCK = "eager", "compiled whole", "compiled by block"
"""How graphs run."""


class DistributedModule(Trainable):
    """One rank's part of a model under a plan. All ranks construct it together, in the same order.

    local: the graph that every rank runs.
    values: whole parameters and buffers by placeholder. Those on the meta device are left empty until
        `runtime.reset_parameters`, `load_state_dict` or a checkpoint fills them.
    sync: take rank 0's values, as DistributedDataParallel does; False if they are known to be equal.
    bare: a call returns the loss itself instead of an `Output`.
    seed: of random numbers; None for that of rank 0's torch generator.
    exact_random: every rank draws for whole tensors, so that a run equals one process exactly.
    captor: the model, which calls that are not the planned step are captured from; without it there are none.
    outputs: how a call returns what ranks share out: whole, dtensor or local (`runtime.variant`).

    Raises:
        MeshError: if the mesh does not have as many ranks as there are processes.
        RankError: on every rank, if the ranks have different plans, models or libraries.
        PlanMismatchError: if the plan stores a parameter in a way that no DTensor can.
        ArgumentError: if the model has a part named as a method of this class.
    """

    def __init__(
        self,
        local: LocalModel,
        values: Mapping[str, Tensor],
        *,
        sync: bool = True,
        bare: bool = False,
        seed: int | None = None,
        exact_random: bool = False,
        captor: Captor | None = None,
        outputs: str = GATHERED,
    ) -> None:
        super().__init__()
        init()
        captured, plan = local.captured, local.plan
        specs: tuple[ParameterSpec | BufferSpec, ...] = (*captured.parameters, *captured.buffers)
        empty = [spec for spec in specs if values[spec.placeholder].is_meta]
        agree({**_facts(local), "values": f"{len(empty)} of {len(specs)} on the meta device"})
        device = own_device()
        self.device_mesh, self.groups = build_groups(plan.mesh, device.type, flattened_axes(local.graph, plan.mesh))
        self.local = local
        self.running = weave_copies(local) if plan.copies > 1 else local
        self.bare = bare
        self.exact_random = exact_random
        self.seed = shared_number(torch.initial_seed() % 2**63 if seed is None else seed)
        self._remakes = "use" in plan.lifetimes.values() or bool(plan.recompute or plan.remade)
        self._compiler: Compiler | None = None
        self._accumulators: dict[tuple[bool, str], Accumulator] = {}
        self._graphs: dict[tuple[bool, str], fx.GraphModule] = {}
        self._reads: dict[fx.GraphModule, tuple[str, ...]] = {}
        self._mutated = captured.written
        whole = all_whole(plan.layouts[spec.placeholder] for spec in captured.parameters)
        self.state = State(local, self.groups.rank, self.device_mesh, device, plain=whole)
        self._late = Late(self.state.add_gradient)
        check_names((name for spec in specs for name in spec.names), dir(self))
        with torch.no_grad():
            self.state.register(self, values, sync)
        self.lacks(name for spec in empty for name in spec.names)
        self.bind()
        install_check()
        self._take_captor(captor, outputs, self._make_variant)
        self.training = captured.training

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.state.device

    @property
    def plan(self) -> StagePlan:
        return self.local.plan

    @property
    def states(self) -> tuple[State, ...]:
        """What this rank holds of the model."""
        return (self.state,)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        return self.local.captured.inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the global batch, which every rank gives whole, or its slices as a `LocalBatch`.

        Arguments are those of the model. Another call than the planned one (in the mode, sizes and arguments) is
        captured once, on all ranks together. Made without a model, a module takes the planned call alone, and returns
        its loss.

        Raises:
            BatchError: if a tensor is missing or has another shape.
            ArgumentError: if a parameter was never given a value, or gradients are wanted of several micro-batches.
            CaptureError: if the call cannot be captured.
            RankError: on every rank, if ranks call otherwise.
        """
        is_local = len(args) == 1 and isinstance(args[0], LocalBatch)
        if is_local:
            args, kwargs = arguments_of(args[0].batch)
        args, kwargs = self.bound(args, kwargs)
        asked, variants = Asked(args=args, kwargs=kwargs, is_local=is_local), self._variants
        if self.training:
            self._refuse_gradients_of_parts()
            if torch.is_grad_enabled():
                self.compare_ranks(args, kwargs, is_local=is_local)
        if variants is not None:
            returns_loss = self.bare and variants.captor.returns_loss(args, kwargs)
            if not (returns_loss and self._is_planned(asked)):
                return variants.run(self, asked)
            variants.flush()
        loss = self.run(bind_inputs(self.local.captured.inputs, args, kwargs), is_local=is_local)
        return loss if self.bare else Output(loss)

    def _refuse_gradients_of_parts(self) -> None:
        accumulation = self.running.captured.accumulation
        if accumulation is not None and torch.is_grad_enabled():
            raise ArgumentError(
                f"the plan runs {accumulation.microbatches} micro-batches a step, one backward pass after each; call "
                "module.train_step(batch), or the module under torch.no_grad() for its outputs alone"
            )

    def train_step(self, batch: Any) -> Tensor:
        if self._variants is None:
            return super().train_step(batch)
        refuse_uncalled_hooks(self)
        is_local = isinstance(batch, LocalBatch)
        args, kwargs = self.bound(*arguments_of(batch.batch if is_local else batch))
        self.compare_ranks(args, kwargs, is_local=is_local)
        asked = Asked(args=args, kwargs=kwargs, is_local=is_local, wants_loss=True)
        self._variants.flush()
        if self._is_planned(asked):
            return self.step(bind_inputs(self.inputs, args, kwargs), is_local=is_local)
        loss = self._variants.run(self, asked)
        loss.backward()
        return cast(Tensor, loss).detach()

    def _is_planned(self, asked: Asked) -> bool:
        """Whether the planned step's graph computes the loss of a call."""
        assert self._variants is not None
        return self._variants.is_planned(self, asked) and guards_hold(self.local.captured, self)

    def _twin(self) -> "DistributedModule":
        captor = None if self._variants is None else self._variants.captor
        own: dict[str, Any] = {"seed": self.seed, "exact_random": self.exact_random, "captor": captor}
        own |= {"outputs": self._outputs, "bare": self.bare}
        return type(self)(self.local, without_values(self.local.captured), sync=False, **own)

    def _make_variant(self, captured: CapturedModel, returned: Returned, gathers: bool) -> Variant:
        assert self._variants is not None
        local = self._variants.captor.local(captured, gathers=gathers)
        axes = flattened_axes(local.graph, self.plan.mesh)
        self.groups.groups.update(build_groups(self.plan.mesh, self.device.type, axes)[1].groups)
        return Variant(Part(self, self.state, local, self._late), returned)

    def step(self, inputs: Mapping[str, Tensor], *, is_local: bool = False) -> Tensor:
        """`train_step` for inputs by placeholder."""
        accumulation = self.running.captured.accumulation
        if accumulation is None:
            with self._late.telling():
                loss = self.run(inputs, is_local=is_local)
                loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        self.check_initialized()
        parts = self._parts(inputs, is_local=is_local)
        with use_groups(self.groups):
            loss, gradients = self._accumulator(accumulation).step(self.state.leaves, parts, self._call)
            for placeholder, gradient in gradients:
                self.state.add_gradient(placeholder, gradient)
        return loss

    def run(self, inputs: Mapping[str, Tensor], *, is_local: bool = False) -> Tensor:
        """The planned step's loss for inputs by placeholder."""
        accumulation = self.running.captured.accumulation
        graph = self._graph()
        self.check_initialized()
        self.refuse_autocast()
        if accumulation is None:
            self._late.begin()
            (whole,) = self._parts(inputs, is_local=is_local)
            loss = self._call(graph, self.state.leaves, whole)[0]
            self.state.keep_watch([loss])
            return cast(Tensor, as_whole(loss))
        self._refuse_gradients_of_parts()
        leaves = self.state.leaves
        results = [self._call(graph, leaves, part) for part in self._parts(inputs, is_local=is_local)]
        return total_loss(accumulation, [loss for loss, _ in results], [n for _, n in results if n is not None])

    def compile(self, *, backend: str = "inductor", by_block: bool = False) -> None:
        """From now on run under `torch.compile(fullgraph=True)`, with the same numbers, collectives and kept tensors.

        backend: inductor (needs a C++ compiler on CPUs) or aot_eager.
        by_block: compile each kind of block once, instead of the whole graph.

        Raises:
            ArgumentError: for another backend, or if the graph has what no tracer can follow.
        """
        from autopar.runtime.compiled import Compiler

        self._compiler = Compiler(self.running, backend, by_block=by_block, exact_random=self.exact_random)

    def _placeholders(self, graph: fx.GraphModule) -> tuple[str, ...]:
        """What a graph reads, in order; looked up once."""
        if graph not in self._reads:
            self._reads[graph] = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
        return self._reads[graph]

    def _parts(self, inputs: Mapping[str, Tensor], *, is_local: bool) -> Iterator[dict[str, Tensor]]:
        """This rank's inputs of each call of a step, by placeholder of what runs."""
        specs, copies = self.local.captured.inputs, self.plan.copies
        batches = [inputs] if self.plan.microbatches == 1 else split_batch(specs, self.plan.microbatches, inputs)
        for first in range(0, len(batches), copies):
            given = ((spec, batch) for batch in batches[first : first + copies] for spec in specs)
            running = zip(self.running.captured.inputs, given, strict=True)
            yield {
                own.placeholder: local_input(self, self.plan, spec, part[spec.placeholder], is_local=is_local)
                for own, (spec, part) in running
            }

    def _call(
        self, graph: fx.GraphModule, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """One (micro-)batch: its loss, and how many labels count if the graph says so."""
        arguments = {**self.state.arguments, **parameters, **inputs}
        draws = self.next_draws(self.plan.copies)[0]
        values = [arguments[name] for name in self._placeholders(graph)]
        remakes = self._remakes and torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.enter_context(use_groups(self.groups))
            stack.enter_context(use_draws(draws))
            if self._compiler is None:
                if torch.is_grad_enabled() and self.running.captured.accumulation is None:
                    stack.enter_context(use_sink(self._late))
                stack.enter_context(regathering() if remakes else nullcontext())
                loss, *results = graph(*values)
            else:
                loss, *results = self._compiler.run(graph, values, self.groups, draws, remakes)
        if self.training:
            with torch.no_grad():
                for spec, value in zip(self._mutated, results, strict=False):
                    if isinstance(spec, ParameterSpec):
                        self.state.write(spec, value)
                    else:
                        self.get_buffer(spec.names[0]).copy_(value)
        return loss, (results[-1] if len(results) > len(self._mutated) else None)

    def local_batch(self, batch: Any) -> LocalBatch:
        """This rank's slices of a global batch: a dict (keywords), a tuple (positions) or one tensor.

        Raises:
            BatchError: if a tensor has another shape than was planned.
        """
        return local_batch(self, batch)

    def local_gradient(self, placeholder: str) -> Tensor | None:
        """This rank's part of the gradient of a parameter, None if there is none yet."""
        return self.state.gradient(placeholder)

    def _written(self) -> fx.Graph:
        """The graph of a micro-batch in the mode the module is in, each collective alone."""
        return again_graph(self.local.graph) if self.training else evaluation_graph(self.local.graph)

    def _run(self) -> fx.Graph:
        """The graph that is run in the mode the module is in, each collective alone."""
        return weave_graph(self._written(), self.local.captured) if self.plan.copies > 1 else self._written()

    def _graph(self) -> fx.GraphModule:
        """The graph of a call, collectives fused as the plan says; what compiles by block keeps each alone."""
        key = self.training, self._kind
        if key not in self._graphs:
            graph = self._run()
            if self._kind != BY_BLOCK:
                graph = fuse_collectives(graph, self.local.captured.parameters, self.plan)
            if self._kind == EAGER:
                graph = start_early(wait_late(prefetch(graph) if self.plan.prefetch else graph))
                if self.plan.copies > 1:
                    graph = start_and_wait(graph, {spec.placeholder for spec in self.running.captured.inputs})
                graph = call_natively(graph)
            self._graphs[key] = fx.GraphModule(nn.Module(), graph)
        return self._graphs[key]

    def _accumulator(self, accumulation: Accumulation) -> Accumulator:
        key = self.training, self._kind
        if key not in self._accumulators:
            self._accumulators[key] = Accumulator(
                self.running,
                self._run(),
                accumulation,
                self.state.masters,
                fuse_body=self._kind != BY_BLOCK,
                eager=self._kind == EAGER,
            )
        return self._accumulators[key]

    @property
    def _kind(self) -> str:
        if self._compiler is None:
            return EAGER
        return BY_BLOCK if self._compiler.by_block else WHOLE


def _facts(local: LocalModel) -> dict[str, str]:
    """What must be equal on all ranks; estimates do not matter, solvers time themselves."""
    text = one_stage(local.plan).with_estimate(Estimate()).to_json()
    return {
        "torch": torch.__version__,
        "autopar": version("autopar"),
        "mesh": str(local.plan.mesh),
        "model": local.captured.fingerprint,
        "plan": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


@contextmanager
def count_messages(module: Trainable) -> Iterator[Sent]:
    """What this rank sends inside: (collective, axis names) -> (calls, payload bytes), as `lower.messages`."""
    groups = module.groups
    before = groups.counting, groups.sent
    groups.counting, groups.sent = True, {}
    try:
        yield groups.sent
    finally:
        groups.counting, groups.sent = before
