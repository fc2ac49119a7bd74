"""torch's own bindings lead to the op that the graph names: the same calls below, the same results and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.own_gradient import Applied, ArgumentSlot
from autopar.passes.call_natively import call_natively, native
from tests.op_sample import Sample, as_results
from tests.op_samples import SAMPLES

aten = torch.ops.aten
BOUND = [sample for sample in SAMPLES if native(sample.target) is not sample.target]


class Reached(TorchDispatchMode):
    """Names of the ops that calls come down to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def as_graph(sample: Sample) -> fx.Graph:
    graph = sample.node().graph
    node = next(n for n in graph.nodes if n.op == "call_function")
    for user in list(node.users):
        graph.erase_node(user)
    graph.output(node)
    return graph


def outcome(graph: fx.Graph, sample: Sample) -> tuple[list[str], list[Tensor]]:
    """What is reached forward and backward; results, and gradients of what may have one."""
    tensors = [t.requires_grad_(i.needs_grad) for t, i in zip(sample.tensors(), sample.inputs, strict=True)]
    with Reached() as reached:
        torch.manual_seed(0)
        results = as_results(fx.GraphModule(nn.Module(), graph)(*tensors))
        summands = [r.sum() for r in results if r.requires_grad]
        if summands:
            torch.stack(summands).sum().backward()
    return reached.names, [*results, *(t.grad for t in tensors if t.grad is not None)]


@pytest.mark.parametrize("sample", BOUND, ids=lambda sample: sample.name)
def test_bindings_reach_the_same_ops(sample: Sample) -> None:
    graph = as_graph(sample)
    names, values = outcome(graph, sample)
    native_names, native_values = outcome(call_natively(graph), sample)
    assert native_names == names
    for got, want in zip(native_values, values, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_most_calls_of_a_model_have_a_binding_and_functions_written_in_python_stay() -> None:
    assert len(BOUND) > len(SAMPLES) / 2
    assert native(aten.mul.Tensor) is torch.mul and native(aten.view.default) is Tensor.view
    for target in (aten._to_copy.default, aten.split.Tensor, aten.silu.default, aten.slice.Tensor, torch.neg):
        assert native(target) is target


def test_a_keyword_that_bindings_call_otherwise_keeps_the_op() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.neg.default, (), {"self": x}))
    (call,) = (node for node in call_natively(graph).nodes if node.op == "call_function")
    assert call.target is aten.neg.default


def test_calls_of_the_user_s_own_that_are_equal_stay_each_itself() -> None:
    """What is equal is found in a cache, but is another object."""

    class Double(torch.autograd.Function):
        pass

    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(2):
        x = graph.call_function(Applied(Double, (ArgumentSlot(0),), ()), (x,))
    graph.output(x)
    calls = [node.target for node in call_natively(graph).nodes if node.op == "call_function"]
    assert all(isinstance(target, Applied) for target in calls) and len(calls) == 2
