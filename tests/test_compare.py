"""What differs between two plans: nothing of a plan and itself, what was changed of one and its change, both ways."""

import random
from dataclasses import replace

import pytest

from autopar.errors import PlanMismatchError
from autopar.report.diff_text import diff_text
from autopar.search.explanation.compare import compare
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_plan, random_recompute
from autopar.search.timeline.buckets import with_buckets
from autopar.values.difference import PlanChange, PlanDifference
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine
from tests.test_microbatch_plans import captured_of as captured_in


def difference(left: StagePlan, right: StagePlan) -> PlanDifference:
    return compare(one_stage(left), one_stage(right), captured_of("llama"), captured_of("llama"))


def any_plan(seed: int = 0) -> StagePlan:
    captured, rng = captured_of("llama"), random.Random(seed)
    return random_recompute(random_plan(captured, make_mesh((2, 2)), rng), captured, rng, share=0.4)


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_and_itself_differ_in_nothing(seed: int) -> None:
    plan = any_plan(seed)
    made = difference(plan, plan)
    assert made.is_empty and not made.changes and "decide and cost the same" in diff_text(made)


def test_both_ways_are_mirrors_and_costs_are_the_estimates() -> None:
    captured, mesh = captured_of("llama"), make_mesh((2, 2))
    one, other = (make_baseline(name, captured, machine(), mesh, TrainConfig()) for name in ("fsdp", "megatron"))
    there, back = difference(one, other), difference(other, one)
    assert not there.is_empty and not there.facts
    turned = {replace(c, left=c.right, right=c.left) for c in back.changes}
    assert set(there.changes) == turned and len(there.changes) == len(back.changes)
    for kind in one.estimate.seconds:
        assert there.seconds.get(kind, (0.0, 0.0)) == (one.estimate.seconds[kind], other.estimate.seconds[kind])
    assert sum(b for _, b in there.nbytes.values()) == other.estimate.peak_nbytes
    q = next(c for c in there.changes if c.what == "model.layers.*.self_attn.q_proj: linear")
    assert "[op]" in diff_text(there) and "[parameter]" in diff_text(there)
    assert q.count == 2 and q.left.startswith("split by batch") and "split by columns on model" in q.right


def test_what_is_changed_is_what_is_said() -> None:
    plan = replace(any_plan(), recompute=frozenset(), remade={}, routes={})
    captured = captured_of("llama")
    names = [n.name for n in captured.graph.nodes if n.name.startswith("linear") and "q_proj" in n.meta["module"]]
    parameters = [p.placeholder for p in captured.parameters if "q_proj" in p.names[0]]
    assert len(names) == len(parameters) == 2
    whole = Layout((INVARIANT, INVARIANT))
    plan = replace(
        plan,
        choices={**plan.choices, **dict.fromkeys(names, ("invariant", "invariant"))},
        layouts={**plan.layouts, **dict.fromkeys(parameters, whole)},
        lifetimes={**plan.lifetimes, **dict.fromkeys(parameters, "always")},
    )
    what, weight = "model.layers.*.self_attn.q_proj: linear", "model.layers.*.self_attn.q_proj.weight"
    rows = Layout((Shard(0), INVARIANT))
    for changed, kind, said in (
        ({"choices": {**plan.choices, names[0]: ("replicate", "replicate")}}, "op", (what, 1)),
        ({"choices": {**plan.choices, **dict.fromkeys(names, ("replicate", "replicate"))}}, "op", (what, 2)),
        ({"layouts": {**plan.layouts, parameters[1]: rows}}, "parameter", (weight, 1)),
        ({"lifetimes": {**plan.lifetimes, **dict.fromkeys(parameters, "use")}}, "parameter", (weight, 2)),
        ({"recompute": frozenset(names)}, "recompute", (what, 2)),
        ({"remade": {names[0]: (Layout((REPLICATE, REPLICATE)),)}}, "sent again", (what, 1)),
        ({"routes": {names[0]: ((whole, rows),)}}, "way", (what, 1)),
    ):
        made = difference(plan, replace(plan, **changed))  # type: ignore[arg-type]
        assert [(c.kind, (c.what, c.count)) for c in made.changes] == [(kind, said)]
        assert isinstance(made.changes[0], PlanChange) and made.changes[0].left != made.changes[0].right
    facts = difference(plan, replace(plan, config=TrainConfig(memory_nbytes=2e9), cluster="4xh100")).facts
    assert facts["memory limit"] == ("what the device has", "2 GB") and facts["cluster"] == ("", "4xh100")


def test_other_numbers_of_micro_batches_compare_and_other_models_do_not() -> None:
    graphs = [captured_in("llama", count) for count in (2, 4)]
    left, right = (one_stage(make_baseline("fsdp", g, machine(2), make_mesh((2,)), TrainConfig())) for g in graphs)
    made = compare(left, right, *graphs)
    assert made.facts["micro-batches"] == ("2", "4") and "mesh" not in made.facts
    assert not [c for c in made.changes if c.kind == "op"]
    other = one_stage(random_plan(captured_of("gpt2"), make_mesh((2,)), random.Random(0)))
    with pytest.raises(PlanMismatchError, match=r"different models, LlamaForCausalLM and GPT2LMHeadModel: parameter"):
        compare(left, other, graphs[0], captured_of("gpt2"))
    with pytest.raises(PlanMismatchError, match="the graph at hand is that of one of 2"):
        compare(left, right, graphs[0], graphs[0])


def test_gathers_that_begin_early_are_said() -> None:
    captured, own = captured_of("llama"), machine(2)
    plan = with_buckets(make_baseline("fsdp", captured, own, make_mesh((2,)), TrainConfig()), captured, own)
    facts = difference(replace(plan, prefetch=True), replace(plan, prefetch=False)).facts
    assert facts["buckets"] == (f"{len(plan.buckets)}, gathers begin early", f"{len(plan.buckets)}")
