"""A distributed module is, to its user, the original module on the global batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tests.runtime_cases as cases
from autopar.errors import ArgumentError, BatchError, PlanMismatchError
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.runtime import DistributedModule, LocalBatch, count_messages, reset_parameters
from autopar.values.local_model import LocalModel
from autopar.values.placement import parse_layout
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks

STEPS, MICRO_BATCHES = 3, 2
Trained = tuple[list[float], list[float], dict[str, Tensor]]


def train(model: nn.Module, read: Any) -> Trained:
    """Losses, gradient norms and the state after a few clipped AdamW steps of two micro-batches each."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            output = model(**cases.batch(10 * step + micro))
            loss = output["loss"] if isinstance(output, dict) else output.loss
            loss.backward()
            losses.append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(cases.whole(norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses, norms, read(model)


def train_whole() -> Trained:
    return train(cases.words(), lambda model: {name: value.clone() for name, value in model.state_dict().items()})


def train_distributed(plan: StagePlan) -> Trained:
    return train(cases.distributed(plan), cases.whole_state)


PLANS = {
    "ddp": lambda mesh: cases.data_parallel(mesh, "whole"),
    "zero3": lambda mesh: cases.data_parallel(mesh),
    "recompute": lambda mesh: cases.recomputed(cases.some_plan(mesh, 5), 0.7),
    "zero3, all recomputed": lambda mesh: cases.recomputed(cases.data_parallel(mesh), 1.0),
    **{f"random{seed}": (lambda mesh, seed=seed: cases.some_plan(mesh, seed)) for seed in range(4)},
}


@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_one_process(plan: str) -> None:
    """Every other plan on two ranks, the rest on two by two."""
    mesh_shape = ((2, 2), (2,))[list(PLANS).index(plan) % 2]
    losses, norms, state = train_whole()
    for got_losses, got_norms, got_state in ranks(len(mesh_shape) * 2).run(train_distributed, PLANS[plan](mesh_shape)):
        assert got_losses == pytest.approx(losses, rel=1e-10)
        assert got_norms == pytest.approx(norms, rel=1e-9)
        assert set(got_state) == set(state)
        for name, value in state.items():
            torch.testing.assert_close(got_state[name], value, rtol=1e-8, atol=1e-9, msg=name)


def names_and_ties(plan: StagePlan) -> tuple[list[str], list[str], bool, bool]:
    module = cases.distributed(plan)
    tied = module.get_parameter("head.weight") is module.get_parameter("embedding.weight")
    frozen = module.get_parameter("frozen").requires_grad
    return [n for n, _ in module.named_parameters()], list(module.state_dict()), tied, frozen


def test_names_are_those_of_the_model() -> None:
    model = cases.words()
    for names, keys, tied, frozen in ranks(2).run(names_and_ties, cases.data_parallel((2,))):
        assert names == [name for name, _ in model.named_parameters()]
        assert sorted(keys) == sorted(model.state_dict())
        assert tied and not frozen


def counted(plan: StagePlan) -> tuple[Any, Any]:
    module = cases.distributed(plan)
    with count_messages(module) as sent:
        module(**cases.batch(1)).backward()
    module(**cases.batch(1)).backward()
    return dict(sent), messages_of(module.local.captured, module.local.plan, on_host=True)


@pytest.mark.parametrize("plan", PLANS)
def test_bytes_sent_are_those_predicted(plan: str) -> None:
    for sent, predicted in ranks(4).run(counted, PLANS[plan]((2, 2))):
        assert sent == predicted


def storage_is_shared(plan: StagePlan) -> None:
    """What is written into parameters in any way is what the next call reads, and gradients land on parameters."""
    module = cases.distributed(plan)
    first = module(**cases.batch(1)).item()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    scaled = module(**cases.batch(1)).item()
    assert abs(scaled - first) > 1e-3

    model = cases.words()
    module.load_state_dict(model.state_dict())  # whole plain tensors
    assert module(**cases.batch(1)).item() == pytest.approx(first, rel=1e-12)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict(saved, assign=True)
    module(**cases.batch(1)).backward()
    for parameter in module.parameters():
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        else:
            assert parameter.grad is None
    assert all(leaf.grad is None for leaf in module.state.leaves.values())
    module.zero_grad()
    assert module(**cases.batch(1)).item() == pytest.approx(first, rel=1e-12)
    half = module.float()
    assert {leaf.dtype for leaf in half.state.leaves.values()} == {torch.float32}


def exchanged(split: StagePlan, whole: StagePlan) -> tuple[list[bool], float]:
    """On a rank: which modules hold DTensors, and how far values are from those they were loaded from."""
    modules = [cases.distributed(plan) for plan in (split, whole)]
    off = 0.0
    for source, target in (modules, modules[::-1]):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(1.5)
        target.load_state_dict(source.state_dict())
        pairs = zip(cases.whole_state(source).values(), cases.whole_state(target).values(), strict=True)
        off = max(off, *(float((a - b).abs().max()) for a, b in pairs))
    return [any(isinstance(p, DTensor) for p in module.parameters()) for module in modules], off


def test_whole_parameters_are_plain_and_take_the_state_of_split_ones() -> None:
    split, whole = cases.data_parallel((2,)), cases.data_parallel((2,), "whole")
    for kinds, off in ranks(2).run(exchanged, split, whole):
        assert kinds == [True, False] and off == 0.0


def test_parameters_and_the_tensors_computed_on_share_storage() -> None:
    ranks(2).run(storage_is_shared, cases.data_parallel((2,)))


def batch_norm_moves(plan: StagePlan) -> None:
    module, model = cases.distributed(plan), cases.words()
    with torch.no_grad():
        module(**cases.batch(1)), model(**cases.batch(1))
    module.eval(), model.eval()
    for _ in range(2):
        with torch.no_grad():
            got, expected = module(**cases.batch(2)).item(), float(model(**cases.batch(2))["loss"])
        assert got == pytest.approx(expected, rel=1e-12)
    assert int(module.get_buffer("batch_norm.num_batches_tracked")) == 1
    model.train(), module.train()
    assert module(**cases.batch(2)).item() != pytest.approx(got, rel=1e-6)


@pytest.mark.parametrize("plan", ["zero3", "random1"])
def test_evaluation_uses_statistics_and_changes_nothing(plan: str) -> None:
    ranks(2).run(batch_norm_moves, PLANS[plan]((2,)))


def dropped(plan: StagePlan) -> tuple[float, float, float, float]:
    exact = cases.distributed(plan, dropout=0.5, exact_random=True, seed=5)
    first, second = exact(**cases.batch(1)).item(), exact(**cases.batch(1)).item()
    module = cases.distributed(plan, dropout=0.5).eval()
    model = cases.words(0.5).eval()
    return first, second, module(**cases.batch(1)).item(), float(model(**cases.batch(1))["loss"].detach())


def test_dropout_follows_the_step_and_stops_in_evaluation() -> None:
    results = [
        result for seed in range(2) for result in ranks(2).run(dropped, cases.some_plan((2,), seed, dropout=0.5))
    ]
    firsts, seconds, evaluated, whole = map(list, zip(*results, strict=True))
    assert firsts == pytest.approx([firsts[0]] * 4, rel=1e-12)
    assert seconds == pytest.approx([seconds[0]] * 4, rel=1e-12)
    assert firsts[0] != pytest.approx(seconds[0], rel=1e-6)
    assert evaluated == pytest.approx(whole, rel=1e-12)


def inputs_whole_or_sliced(plan: StagePlan) -> None:
    module = cases.distributed(plan, bare=True)
    whole = cases.batch(1)
    expected = module(**whole).item()
    part = module.local_batch(whole)
    assert part.batch["ids"].shape[0] == cases.BATCH // 2
    assert module(part).item() == expected
    for rows in (3, cases.BATCH // 2):
        with pytest.raises(BatchError, match=rf"\({rows}, 4\).*\(8, 4\).*every rank.*LocalBatch"):
            module(**cases.batch(1, rows=rows))
    with pytest.raises(BatchError, match=r"\(8, 4\).*this rank's slices \(\(4, 4\)\)"):
        module(LocalBatch(whole))
    with pytest.raises(BatchError, match="ids"):
        module(labels=whole["labels"])


def test_a_call_takes_the_global_batch_or_the_slice_of_a_rank() -> None:
    ranks(2).run(inputs_whole_or_sliced, cases.data_parallel((2,)))


def from_meta(plan: StagePlan) -> dict[str, Tensor]:
    graph, model = cases.captured(), cases.words()
    twin = copy.deepcopy(model).to("meta")
    twin.head.weight = twin.embedding.weight
    from autopar.oracle.reference import buffers_of, parameters_of

    local: LocalModel = emit(graph, plan)
    module = DistributedModule(local, {**parameters_of(graph, twin), **buffers_of(graph, twin)})
    with pytest.raises(ArgumentError, match="reset_parameters"):
        module(**cases.batch(1))
    with pytest.raises(ArgumentError, match="''"):  # the root owns a weight and a buffer, and says not how to make them
        reset_parameters(module, twin)
    torch.manual_seed(int(module.groups.rank))

    def init(part: nn.Module) -> None:
        if isinstance(part, cases.Words):
            part.frozen.fill_(1.0)
            part.table.normal_()
        else:
            part.reset_parameters()  # type: ignore[operator]

    reset_parameters(module, twin, init)
    assert twin.head.weight is twin.embedding.weight and twin.head.weight.is_meta
    assert module(**cases.batch(1)).item() > 0
    drawn = cases.whole_state(module)
    module.load_state_dict(model.state_dict())
    assert module(**cases.batch(1)).item() == pytest.approx(float(model(**cases.batch(1))["loss"].detach()), rel=1e-12)
    return drawn


def test_a_model_on_the_meta_device_gets_equal_values_on_all_ranks() -> None:
    first, *others = ranks(4).run(from_meta, cases.data_parallel((2, 2)))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert first["blocks.0.up.weight"].std() > 0.01 and first["blocks.0.norm.weight"].eq(1).all()


def refused(plan: StagePlan, layout: str) -> None:
    bad = {**plan.layouts}
    name = next(p.placeholder for p in cases.captured().parameters if p.names[0] == "blocks.0.up.weight")
    bad[name] = parse_layout(layout)
    plan = StagePlan(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "layouts": bad})
    with pytest.raises(PlanMismatchError, match=r"blocks\.0\.up\.weight"):
        cases.distributed(plan)


def test_storage_whose_gradient_would_be_a_summand_is_refused() -> None:
    ranks(2).run(refused, cases.data_parallel((2,)), "R")
