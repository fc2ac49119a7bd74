"""A compiled module equals the eager one: loss, gradients, what is sent, what is kept, and how much is compiled."""

import importlib.util
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import ArgumentError
from autopar.export.folder import export_folder
from autopar.lower.emit import emit
from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.recompute import again_graph
from autopar.runtime import DistributedModule, count_messages, load_exported, partition
from autopar.runtime.compiled import Compiler
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_recompute
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout
from autopar.values.plan import one_stage
from autopar.values.plan_file import load_plan
from autopar.values.stage_plan import StagePlan, Way
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks
from tests.runtime_cases import BATCH, WIDTH, batch, captured, data_parallel, distributed, recomputed, some_plan, words
from tests.search_cases import exact_of
from tests.test_recompute import measured_nbytes, whole_plan
from tests.test_runtime_train_step import PLANS
from tests.zoo import zoo

KINDS = 3
"""Of pieces: a block, and what stands before and after the blocks."""

RETURNED_NBYTES = 8 * (2 * WIDTH + 1)
"""What `measured_nbytes` counts beside what backward keeps: new statistics of the batch norm, and the loss's base."""


def compare(plan: StagePlan, dropout: float = 0.0, *, by_block: bool = False) -> int:
    """Two steps, eager and compiled, are equal on this rank; how often the backend ran."""
    eager, compiled = (distributed(plan, dropout, seed=5) for _ in range(2))
    return equal(eager, compiled, "aot_eager", by_block, [batch(n, BATCH * plan.microbatches) for n in range(2)])


def equal(
    eager: DistributedModule,
    compiled: DistributedModule,
    backend: str,
    by_block: bool,
    batches: list[dict[str, Tensor]],
) -> int:
    compiled.compile(backend=backend, by_block=by_block)
    for data in batches:
        with count_messages(eager) as sent:
            loss = eager.train_step(data)
        calls = dict(sent)
        with count_messages(compiled) as sent:
            torch.testing.assert_close(compiled.train_step(data), loss, rtol=1e-12, atol=0)
        assert sent == calls, (dict(sent), calls)
        for spec in eager.local.captured.parameters:
            if spec.trainable:
                want, got = eager.local_gradient(spec.placeholder), compiled.local_gradient(spec.placeholder)
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer)
    compiler = compiled._compiler
    assert compiler is not None
    return compiler.num_compiled


def random_plans_in_one_graph() -> list[int]:
    """With dropout; and in micro-batches, most of whose ops backward makes again, in random buckets."""
    again = recomputed(some_plan((2,), 3, microbatches=2), 0.7)
    again = random_buckets(again, captured(microbatches=2), random.Random(3))
    for_use = random_buckets(PLANS["use"]((2,), 1), captured(), random.Random(4))
    return [compare(plan, dropout) for plan, dropout in ((some_plan((2,), 2, 0.1), 0.1), (again, 0.0), (for_use, 0.0))]


def one_plan_by_block() -> int:
    return compare(data_parallel((2,)), by_block=True)


class Tiny(nn.Module):
    """Inductor compiles C++ for half a minute a graph: the least that gathers, reduces and scatters, in a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x)).square().mean()


def tiny_by_inductor() -> int:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, data = Tiny().double(), {"x": torch.randn(4, 4, dtype=torch.float64)}
    graph = capture(model, (), data)
    plan = make_baseline("fsdp", graph, load_cluster("2xcpu"), make_mesh((2,)), TrainConfig(precision="fp64"))
    plan = replace(plan, buckets=(tuple(spec.placeholder for spec in graph.parameters),))
    values = {**parameters_of(graph, model), **buffers_of(graph, model)}
    eager, compiled = (DistributedModule(emit(graph, plan), values, seed=5) for _ in range(2))
    return equal(eager, compiled, "inductor", False, [data])


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


def tiny_in_levels() -> int:
    """A layer of odd sizes, whole on all of two by two ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, data = Odd().double(), {"x": torch.randn(4, 5, dtype=torch.float64)}
    graph = capture(model, (), data)
    plan = make_baseline("ddp", graph, load_cluster("4xcpu"), make_mesh((2, 2)), TrainConfig(precision="fp64"))
    path = (Layout((INVARIANT, INVARIANT)), Layout((REPLICATE, REPLICATE)))
    names = [spec.placeholder for spec in graph.parameters]
    plan = replace(plan, ways=dict.fromkeys(names, Way(path=path, inside=("data",))))
    values = {**parameters_of(graph, model), **buffers_of(graph, model)}
    total = 0
    for buckets in ((), (tuple(names),)):
        local = emit(graph, replace(plan, buckets=buckets))
        eager, compiled = (DistributedModule(local, values, seed=5) for _ in range(2))
        total += equal(eager, compiled, "aot_eager", False, [data])
    return total


def exported_code(folder: str) -> int:
    """The exported folder, compiled, against the graph it was written from."""
    spec = importlib.util.spec_from_file_location("compiled_model", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules["compiled_model"] = code
    spec.loader.exec_module(code)
    named = dict(words().named_parameters())
    own = load_exported(folder, [code.forward], lambda name, shape, dtype: named[name].detach(), seed=5)
    return equal(distributed(load_plan(Path(folder) / "plan.json").single, seed=5), own, "aot_eager", False, [batch(0)])


def test_exported_code_compiles(tmp_path: Path) -> None:
    model, plan = words(), recomputed(some_plan((2,), 4), 0.5)
    local = emit(captured(), plan)
    values = {**parameters_of(captured(), model), **buffers_of(captured(), model)}
    export_folder(tmp_path, captured(), [local], one_stage(plan), values)
    assert ranks(2).run(exported_code, str(tmp_path)) == [1, 1]


def test_one_graph_equals_eager() -> None:
    assert ranks(2).run(random_plans_in_one_graph) == [[1, 1, 1]] * 2


def test_reductions_in_levels_equal_eager() -> None:
    assert ranks(4).run(tiny_in_levels) == [2] * 4


def test_equal_blocks_compile_once() -> None:
    assert ranks(2).run(one_plan_by_block) == [KINDS] * 2


def test_equal_blocks_draw_their_own_dropout_masks() -> None:
    model, kwargs = zoo("gpt2", dtype=torch.float64, dropout=0.1)
    graph = exact_of("gpt2", dropout=0.1)
    plan = whole_plan(graph)
    eager, gradients = one_rank(graph, plan, model, kwargs, None)
    compiler = Compiler(emit(graph, plan), "aot_eager", by_block=True, exact_random=True)
    loss, found = one_rank(graph, plan, model, kwargs, compiler)
    assert compiler.num_compiled == KINDS
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(found, gradients)


def one_rank(
    graph: CapturedModel, plan: StagePlan, model: nn.Module, kwargs: dict[str, Any], compiler: Compiler | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients on a mesh of one rank."""
    module = fx.GraphModule(nn.Module(), again_graph(emit(graph, plan).graph))
    groups, draws = Groups(mesh=plan.mesh, rank=0, groups={}), Draws(seed=1, step=0, exact=True)
    arguments = arguments_of(graph, module, model, kwargs)
    with use_groups(groups), use_draws(draws):
        run = module(*arguments) if compiler is None else compiler.run(module, arguments, groups, draws, True)
    run[0].backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return run[0].detach(), gradients


def arguments_of(
    graph: CapturedModel, module: fx.GraphModule, model: nn.Module, kwargs: dict[str, Any]
) -> list[Tensor]:
    inputs = {spec.placeholder: kwargs[spec.path] for spec in graph.inputs}
    values = {**parameters_of(graph, model), **buffers_of(graph, model), **graph.constants, **inputs}
    return [values[node.name] for node in module.graph.nodes if node.op == "placeholder"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for CPUs, and there is no g++")
def test_inductor_equals_eager() -> None:
    assert ranks(2).run(tiny_by_inductor) == [1] * 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_is_kept_is_what_eager_keeps(share: float) -> None:
    """Bytes between forward and backward on one rank, of what neither a caller holds nor a view shares."""
    plan = random_recompute(whole_plan(captured()), captured(), random.Random(share), share=share)
    model = words()
    eager = measured_nbytes(captured(), plan, model, batch(0))
    compiled = kept_by_compiled(captured(), plan, model, batch(0))
    assert eager - RETURNED_NBYTES == compiled


def kept_by_compiled(graph: CapturedModel, plan: StagePlan, model: nn.Module, kwargs: dict[str, Any]) -> int:
    local = emit(graph, plan)
    module = fx.GraphModule(nn.Module(), again_graph(local.graph))
    kept: list[int] = []

    def recorded(joint: fx.GraphModule, given: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = original(joint, given, num_fwd_outputs=num_fwd_outputs, **options)
        results = forward.graph.output_node().args[0]
        handed = {_base(node) for node in results[:num_fwd_outputs]}
        bases = {_base(node) for node in results[num_fwd_outputs:]}
        made = [n for n in bases - handed if n.op != "placeholder"]
        kept.append(sum(n.meta["val"].untyped_storage().nbytes() for n in made))
        return forward, backward

    def _base(node: fx.Node) -> fx.Node:
        while partition._is_view(node) and node.op == "call_function" and isinstance(node.args[0], fx.Node):
            if isinstance(node.args[0].meta["val"], tuple | list):
                return node
            node = node.args[0]
        return node

    original = partition.default_partition
    with mock.patch.object(partition, "default_partition", recorded):
        compiler = Compiler(local, "aot_eager", by_block=False, exact_random=False)
        groups, draws = Groups(mesh=plan.mesh, rank=0, groups={}), Draws(seed=1, step=0)
        compiler.run(module, arguments_of(graph, module, model, kwargs), groups, draws, True)
    [nbytes] = kept
    return nbytes


def test_an_unknown_backend_is_an_error() -> None:
    local = emit(captured(), whole_plan(captured()))
    with pytest.raises(ArgumentError, match="no compile backend 'nvfuser'"):
        Compiler(local, "nvfuser", by_block=False, exact_random=False)
