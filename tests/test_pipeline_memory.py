"""The peak of tensors on every rank of a pipeline is the predicted one, within 5%, whatever the schedule."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import split_stages
from autopar.rules.spare import short_name
from autopar.runtime import PipelinedModule
from autopar.runtime.peak_memory import watch
from autopar.runtime.pipeline import staged_model
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.random_plan import random_cuts, random_staged_plan
from autopar.search.staged.staged_memory import held_without_optimizer, peaks_without_optimizer, stage_memory
from autopar.values.graph import CapturedModel, operands, requires_grad
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from autopar.values.placement import PARTIAL, Layout
from autopar.values.plan import Plan
from autopar.values.plan_file import plan_from_json
from autopar.values.serialize import dump, load
from tests.process_group import ranks
from tests.search_cases import captured_of, machine
from tests.zoo import zoo


@cache
def case(family: str, microbatches: int) -> tuple[CapturedModel, dict[str, Tensor], dict[str, Tensor]]:
    """Graph, values and the inputs of a step by placeholder."""
    model, kwargs = zoo(family)
    captured = accumulate_gradients(captured_of(family), microbatches, lambda: case(family, 1)[0])
    values = {
        name: value.detach() for name, value in (parameters_of(captured, model) | buffers_of(captured, model)).items()
    }
    inputs = {n: torch.cat([v] * microbatches) for n, v in bind_inputs(captured.inputs, (), kwargs).items()}
    return captured, values, inputs


def measured(text: str, graph: bytes, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> int:
    """Peak of this rank in steps before the optimizer has a state; the least of two: Gloo's threads hold buffers."""
    plan, captured = plan_from_json(text), load(graph)
    module = PipelinedModule(staged_model(captured, plan), values, sync=False)
    peaks = []
    for _ in range(2):
        with watch(module, inputs) as memory:
            module.step(inputs)
        peaks.append(memory.peak)
        module.zero_grad(set_to_none=True)
    return min(peaks)


def errors(
    family: str,
    schedule: str,
    mesh: int | tuple[int, ...],
    pipeline: int,
    stages: int,
    microbatches: int,
    recompute: float = 0.0,
    seed: str = "",
) -> list[float]:
    """Of each rank under a random plan: how far the prediction is off."""
    captured, values, inputs = case(family, microbatches)
    rng = Random(f"{family} {schedule} {microbatches}{seed}")
    cuts, shape = random_cuts(captured, stages, rng), mesh if isinstance(mesh, tuple) else (mesh,)
    plan = random_staged_plan(captured, make_mesh(shape), schedule, pipeline, cuts, rng, recompute=recompute)
    return errors_of(plan, captured, values, inputs)


def errors_of(
    plan: Plan, captured: CapturedModel, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> list[float]:
    said = peaks_without_optimizer(plan, split_stages(captured, plan.cuts), machine(plan.mesh.size))
    seen = ranks(plan.world).run(measured, plan.to_json(), dump(captured), values, inputs)
    return [said[rank // plan.mesh.size] / peak - 1 for rank, peak in enumerate(seen)]


@pytest.mark.parametrize(("family", "microbatches"), [("gpt2", 1), ("bert", 4)])
def test_gpipe(family: str, microbatches: int) -> None:
    assert max(map(abs, errors(family, "gpipe", 2, 2, 2, microbatches))) <= 0.05


@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", (1, 4, 4)), ("gpt2", (2, 2, 2)), ("frozen_resnet", (1, 4, 4)), ("frozen_resnet", (2, 2, 2))],
)
def test_1f1b(family: str, shape: tuple[int, int, int]) -> None:
    assert max(map(abs, errors(family, "1f1b", *shape, 4))) <= 0.05


@pytest.mark.parametrize("family", ["bert", "llama", "whisper"])
def test_interleaved(family: str) -> None:
    assert max(map(abs, errors(family, "interleaved-1f1b", 1, 2, 4, 2))) <= 0.05


def test_rounds_of_another_number_of_micro_batches_than_ranks() -> None:
    assert max(map(abs, errors("llama", "interleaved-1f1b", 1, 4, 8, 5))) <= 0.05


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_zbv(family: str) -> None:
    assert max(map(abs, errors(family, "zbv", 1, 2, 4, 4))) <= 0.05


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_zbv_of_stages_that_are_recomputed(family: str) -> None:
    assert max(map(abs, errors(family, "zbv", 1, 2, 4, 2, recompute=0.5))) <= 0.05


def test_copies_on_the_way_to_what_lives_for_a_step_are_gone() -> None:
    """On two axes a parameter goes step by step; what is between was held to the step's end: 5.6% too much."""
    assert max(map(abs, errors("bert", "1f1b", (2, 2), 2, 2, 4, seed=" 5"))) <= 0.02


def test_a_view_that_copies_is_replayed_with_what_it_views() -> None:
    """4.2% too much where it was kept."""
    assert max(map(abs, errors("bert", "zbv", 2, 2, 4, 4, recompute=0.5, seed=" 8"))) <= 0.02


def test_the_gradient_of_a_sum_is_copied_where_a_view_of_it_cannot_be() -> None:
    """Mixtral adds up its experts, of rows that a view had put together: 6.1% too little."""
    assert max(map(abs, errors("mixtral", "zbv", 1, 2, 4, 2))) <= 0.02


def test_what_lies_contiguous_is_sent_as_it_is() -> None:
    """4.6% too much where a copy of it was counted."""
    assert max(map(abs, errors("whisper", "gpipe", 2, 2, 2, 4, recompute=0.5, seed=" 4"))) <= 0.02


def test_a_graph_is_held_alike_by_whoever_loads_it() -> None:
    captured, _, _ = case("gpt2", 2)
    loaded = load(dump(captured)).nodes
    strides = {n.name: n.meta["val"].stride() for n in captured.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    assert {name: loaded[name].meta["val"].stride() for name in strides} == strides


def test_a_weight_of_two_stages_of_a_rank_is_held_once() -> None:
    """Tied embeddings are of the first stage and of the last, which under zbv are both the first rank's."""
    captured, _, _ = case("gpt2", 1)
    rng = Random(0)
    cuts = random_cuts(captured, 4, rng)
    plan = random_staged_plan(captured, make_mesh((1,)), "zbv", 2, cuts, rng)
    stages = split_stages(captured, cuts)
    own = {p.placeholder: prod(p.shape) * 4 for n in plan.stages_of(0) for p in stages[n].parameters}
    assert len(own) < sum(len(stages[n].parameters) for n in plan.stages_of(0))
    assert held_without_optimizer(plan, stages, machine(1))[0]["parameters"] == sum(own.values())


def test_a_gradient_that_passes_through_is_copied() -> None:
    """On the leaf that was received, since whoever gave it holds it; not where autograd is asked for it alone."""
    captured, _, _ = case("llama", 1)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function" and n.name.startswith("linear")]
    cuts = (names[1], names[2])  # between products of attention, so that the residual passes through
    plan = random_staged_plan(captured, make_mesh((1,)), "gpipe", 3, cuts, Random(0))
    stages = split_stages(captured, cuts)
    sent = {name: plan.stages[2].layouts[name] for name in stages[1].sends}
    pricer = make_pricer(mesh=plan.mesh, cluster=machine(1), config=plan.config)
    live = Live(lower(plan.stages[1], make_program(stages[1]), pricer.target, sent))
    redistributed = [live.redistributed[name] for name in sent if name in stages[1].received]
    passing = {
        (j.tensor.name, j.source) for j in redistributed if j.tensor.requires_grad and j.source == sent[j.tensor.name]
    }
    alone = {value for value in passing if all(position < 0 for position, _, _ in live.redistributed[value[0]].wanted)}
    assert alone
    for copies in (True, False):
        found = live.gradients(copies=copies).held
        assert all((found[value].nbytes > 0) == copies for value in alone)


@pytest.mark.parametrize("family", ["resnet", "whisper"])
def test_a_gradient_that_several_received_share_is_held_once(family: str) -> None:
    """Summands that are reduced first are given the one gradient of their sum, as all-reduces hand it on."""
    captured, _, _ = case(family, 1)
    sums = [n.name for n in captured.graph.nodes if short_name(n) == "add" and all(map(requires_grad, operands(n)))]
    shared = 0
    for name in sums:
        plan = random_staged_plan(captured, make_mesh((2,)), "gpipe", 2, (name,), Random(0))
        stage = split_stages(captured, plan.cuts)[1]
        partial = {received: Layout((PARTIAL,)) for received in stage.received}
        second = plan.stages[1]
        second = replace(
            second, layouts={**second.layouts, **partial}, choices={**second.choices, name: ("invariant",)}
        )
        pricer = make_pricer(mesh=plan.mesh, cluster=machine(2), config=plan.config)
        live = Live(lower(second, make_program(stage), pricer.target))
        given = [g for (received, _), g in live.gradients().held.items() if received in stage.received]
        shared += len(given) - len(set(map(id, given)))
        once = {id(g): g.nbytes for g in given}
        assert sum(h.nbytes for h in live.holdings if h.role == "given") == sum(once.values())
    assert shared


def test_what_moves_once_a_step_is_in_no_pass() -> None:
    """What is gathered for all micro-batches is so before the first, and reduced after the last."""
    captured, _, _ = case("gpt2", 2)
    rng = Random(3)
    cuts = random_cuts(captured, 2, rng)
    plan = random_staged_plan(captured, make_mesh((2,)), "gpipe", 2, cuts, rng)
    stage = split_stages(captured, cuts)[1]
    pricer = make_pricer(mesh=plan.mesh, cluster=machine(2), config=plan.config)
    live = Live(lower(plan.stages[1], make_program(stage), pricer.target))
    once = [h for h in live.holdings if h.role == "once"]
    whole = stage_memory(live, stage)
    live.holdings = [h for h in live.holdings if h.role != "once"]
    rest = stage_memory(live, stage)
    assert all((whole.passes[kind] == rest.passes[kind]).all() for kind in whole.passes)
    opened, closed = ([h.nbytes for h in once if (h.first >= len(live.calls)) == late] for late in (False, True))
    for nbytes, vector, without in ((opened, whole.opening, rest.opening), (closed, whole.closing, rest.closing)):
        assert nbytes and max(nbytes) <= vector.sum() <= sum(nbytes) and not without.any()


def test_a_stage_of_what_any_stage_may_make_holds_nothing_of_its_own() -> None:
    """Whisper's first calls shift the labels: every stage that needs them makes them again, and no stage is theirs."""
    captured, _, _ = case("whisper", 2)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    plan = random_staged_plan(captured, make_mesh((1,)), "gpipe", 2, (names[1],), Random(0))
    stages = split_stages(captured, plan.cuts)
    assert not any(n.op == "call_function" for n in stages[0].graph.nodes)
    held = held_without_optimizer(plan, stages, machine(1))[0]
    assert {kind for kind, nbytes in held.items() if nbytes} == {"inputs"}


def test_recomputed_stages() -> None:
    assert max(map(abs, errors("llama", "1f1b", 2, 2, 2, 2, recompute=0.5))) <= 0.05


def test_what_a_split_batch_norm_normalises_is_replayed() -> None:
    """Composed of torch's operations it kept a copy of its own, whatever the plan said: 3.0% off."""
    assert max(map(abs, errors("resnet", "gpipe", 2, 2, 2, 1, recompute=0.5, seed=" 4"))) <= 0.02


def small_case(
    loss: Callable[[Tensor, Tensor], Tensor], microbatches: int
) -> tuple[CapturedModel, dict[str, Tensor], dict[str, Tensor]]:
    """Two layers, the loss of what they make of the inputs and of targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def captured_of_rows(rows: int) -> CapturedModel:
        batch = tuple(torch.zeros(2, rows, 16))
        return capture(model, batch, loss_fn=lambda made, given: loss(made, given[1]))

    captured = accumulate_gradients(captured_of_rows(16), microbatches, lambda: captured_of_rows(16 * microbatches))
    values = {name: value.detach() for name, value in parameters_of(captured, model).items()}
    inputs = {spec.placeholder: torch.randn(16 * microbatches, 16) for spec in captured.inputs}
    return captured, values, inputs


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss])
@pytest.mark.parametrize("cut", ["relu", "linear_1", "loss"])
def test_the_loss_of_a_small_model(loss: Callable[[Tensor, Tensor], Tensor], cut: str) -> None:
    """Both tensors of a loss are broadcast before it, which was counted as a copy of each, and torch's own mean of it
    is one number on the storage of all that it reduces: up to 13% too low."""
    captured, values, inputs = small_case(loss, 4)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    at = cut if cut in names else names[names.index("linear_1") + 1]
    plan = random_staged_plan(captured, make_mesh((1,)), "1f1b", 2, (at,), Random(0))
    assert max(map(abs, errors_of(plan, captured, values, inputs))) <= 0.02


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_an_input_that_none_reads_is_held(schedule: str) -> None:
    """Every rank takes the whole batch, what the model ignores with it: up to 15% too low."""
    captured, values, inputs = small_case(lambda made, _: made.square().mean(), 4)
    read = [spec.placeholder for spec in captured.inputs if captured.nodes[spec.placeholder].users]
    assert len(read) == 1 < len(captured.inputs)
    plan = random_staged_plan(captured, make_mesh((1,)), schedule, 2, ("relu",), Random(0))
    assert max(map(abs, errors_of(plan, captured, values, inputs))) <= 0.02


def test_a_weight_on_its_way_through_a_cut() -> None:
    """Experts' weights, split and permuted where stages are cut: their gradients come back permuted, to a leaf that
    copies them then, and to a part of a weight that two ranks have."""
    captured, values, inputs = case("mixtral", 1)
    names = [node.name for node in captured.graph.nodes if node.op == "call_function"]
    grouped = [i for i, name in enumerate(names) if name.startswith("grouped_linear")]
    permuted = max(i for i in range(grouped[0]) if names[i].startswith("permute"))
    split = max(i for i in range(permuted) if names[i].startswith("slice"))
    cuts = (names[split], names[permuted], names[grouped[2]])
    plan = random_staged_plan(captured, make_mesh((1,)), "gpipe", 4, cuts, Random(0))
    assert max(map(abs, errors_of(plan, captured, values, inputs))) <= 0.01


class Tied(nn.Module):
    """A table of words that is read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.words(ids).relu(), self.words.weight).square().mean()


def test_a_gradient_of_two_ranks_takes_no_room_beside_itself() -> None:
    """When a step ends ranks sum the gradients of a weight that both have: zeros are there only where there is none."""
    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(4)
    captured = capture(model, (ids,))
    values = {name: value.detach() for name, value in parameters_of(captured, model).items()}
    plan = random_staged_plan(captured, make_mesh((1,)), "gpipe", 2, ("linear",), Random(0))
    (spec,) = captured.inputs
    assert max(map(abs, errors_of(plan, captured, values, {spec.placeholder: ids}))) <= 0.02
