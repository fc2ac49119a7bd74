"""Labels are counted over ranks from the first call on, whatever the plan; nothing else of the graph changes.

That values and bytes stay as they are, every random plan of `plans_in_threads` shows, which runs this pass.
"""

import random
from collections import Counter

import pytest
from torch import fx

from autopar.lower.emit import emit
from autopar.ops.cross_entropy import cross_entropy, start_count
from autopar.passes.recompute import again_graph
from autopar.passes.start_early import start_early
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_recompute
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine


def written(family: str, baseline: str) -> fx.Graph:
    captured = captured_of(family)
    plan = make_baseline(baseline, captured, machine(2), make_mesh((2,)), TrainConfig())
    return emit(captured, plan).graph


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_labels_are_counted_before_anything_else_is_computed(family: str) -> None:
    """In GPT-2 labels are shifted first."""
    before = written(family, "ddp")
    after = start_early(before)
    calls = [node for node in after.nodes if node.op == "call_function"]
    (started,) = (node for node in calls if node.target is start_count)
    needed: set[fx.Node] = {started}
    for node in reversed(calls):
        if node in needed:
            needed.update(node.all_input_nodes)
    assert set(calls[: calls.index(started)]) == {node for node in needed if node.op == "call_function"} - {started}
    assert not any(node.meta.get("requires_grad") for node in needed if node.op == "call_function")
    (loss,) = (node for node in calls if node.target is cross_entropy)
    assert loss.kwargs["counted"] is started
    targets = Counter(str(node.target) for node in after.nodes)
    assert targets - Counter(str(node.target) for node in before.nodes) == {str(start_count): 1}
    assert len(targets) == len({str(node.target) for node in before.nodes}) + 1


def test_what_is_counted_again_in_backward_stays() -> None:
    captured, rng = captured_of("llama"), random.Random(0)
    plan = make_baseline("ddp", captured, machine(2), make_mesh((2,)), TrainConfig())
    again = again_graph(emit(captured, random_recompute(plan, captured, rng, share=1.0)).graph)
    assert start_early(again) is again
