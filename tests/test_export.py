"""Exported code is the graph: same loss and gradients bit for bit, readable, standing alone."""

import ast
import contextlib
import io
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.api.model_plan import model_plan
from autopar.capture import capture
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.export.folder import export_folder
from autopar.export.source import generate
from autopar.export.training import index_limits, training_script
from autopar.lower.emit import emit
from autopar.lower.regions import sections
from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.ops.regather import regathering
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.runtime.exported import load_exported
from autopar.runtime.loading import latest
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_plan, random_recompute
from autopar.values.calls import Call
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.local_model import LocalModel
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks, run_apart
from tests.search_cases import captured_of
from tests.zoo import FAMILIES, zoo
from tests.zoo_graphs import zoo_graph


def uniform_plan(captured: CapturedModel, mesh: Mesh) -> StagePlan:
    """Every op whole, parameters of two dims stored in shards: alike in every layer."""
    plan = random_plan(captured, mesh, random.Random(0))
    whole = ("invariant",) * mesh.num_axes
    layouts = dict(plan.layouts)
    for parameter in captured.parameters:
        sharded = len(parameter.shape) == 2 and parameter.shape[0] % mesh.size == 0
        axes = (Shard(0), *[INVARIANT] * (mesh.num_axes - 1)) if sharded else (INVARIANT,) * mesh.num_axes
        layouts[parameter.placeholder] = Layout(axes)
    for spec in captured.inputs:
        layouts[spec.placeholder] = Layout((REPLICATE,) * mesh.num_axes)
    lifetimes = dict.fromkeys(plan.lifetimes, "use")
    return replace(plan, choices=dict.fromkeys(plan.choices, whole), layouts=layouts, lifetimes=lifetimes)


def execute(source: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(source, "model.py", "exec"), namespace)
    return namespace["forward"]


def outputs_and_gradients(
    local: LocalModel, model: nn.Module, kwargs: dict[str, Any], source: str | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results and gradients on a mesh of one rank, of the graph or of exported source."""
    captured = local.captured
    parameters = {
        n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in parameters_of(captured, model).items()
    }
    inputs = bind_inputs(captured.inputs, (), kwargs)
    values = {**parameters, **buffers_of(captured, model), **captured.constants, **inputs}
    groups = Groups(mesh=local.plan.mesh, rank=0, groups={})
    with use_groups(groups), use_draws(Draws(seed=1, step=2)), regathering():
        if source is None:
            names = [node.name for node in local.graph.nodes if node.op == "placeholder"]
            results = fx.GraphModule(nn.Module(), local.graph)(*(values[name] for name in names))
        else:
            w = {name: values[s.placeholder] for s in captured.parameters for name in s.names}
            w |= {name: values[s.placeholder] for s in captured.buffers for name in s.names}
            results = execute(source)({**w, **captured.constants}, *inputs.values())
    results[0].backward()
    return list(results), [p.grad for p in parameters.values()]


def with_dropout(family: str) -> CapturedModel:
    return zoo_graph(family, dropout=0.1)


@pytest.mark.parametrize(
    ("family", "kind"),
    [(f, ("random", "uniform", "recompute")[i % 3]) for i, f in enumerate(FAMILIES[1::2])],
)
def test_exported_code_computes_the_graph_bit_for_bit(family: str, kind: str) -> None:
    """On a 1x1 mesh all the plan's collectives stand in the code and send nothing."""
    model, kwargs = zoo(family, dropout=0.1)
    captured, mesh = with_dropout(family), make_mesh((1, 1))
    plan = uniform_plan(captured, mesh)
    if kind == "random":  # of four ranks: on axes of one, random plans are Invariant
        plan = replace(random_plan(captured, make_mesh((2, 2)), random.Random(family)), mesh=mesh)
    if kind == "recompute":
        plan = random_recompute(plan, captured, random.Random(family), share=0.7)
    local = emit(captured, plan)
    source = generate(local)
    assert kind != "random" or "all_gather(" in source
    assert ("again(" in source) == (kind == "recompute")
    results, gradients = outputs_and_gradients(local, model, kwargs, None)
    exported, exported_gradients = outputs_and_gradients(local, model, kwargs, source)
    assert all(torch.equal(a, b) for a, b in zip(results, exported, strict=True))
    for a, b in zip(gradients, exported_gradients, strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


ODD = (
    ("class", "import", "def"), ("a b", "a-b", "a - b"), ("é", "ü ñ", "名前"), ('a"b', "a'b", "a\\b"), ("a\nb", "a\rb"),
    ('x"]; exec("raise SystemExit"); w["x',), ('"""', "\\"), ("{i}", "{0}"), ("0", "1", "2"), ("[", "(,", "),"),
    ("forward_", "w", "torch", "F", "aten"), ("a", "ª"), ("a²", "b½", "a"), ("\u2028", "\x00", " "), ("#c",),
    ("a" * 300,),
)  # fmt: skip


class Named(nn.Module):
    """Modules and parameters of these names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.first = names[0]
        self.add_module(self.first, nn.ModuleDict({name: nn.Linear(4, 4) for name in names}))
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.full((4,), 1.5)) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name, part in getattr(self, self.first).items():
            x = torch.tanh(part(x)) * self.scales[name]
        return x.mean()


def renamed(captured: CapturedModel, names: dict[str, str]) -> CapturedModel:
    """The graph with other words for parts of the names of modules and parameters; torch itself traces not all."""

    def other(path: str) -> str:
        return ".".join(names.get(part, part) for part in path.split("."))

    for node in captured.graph.nodes:
        node.meta["module"] = other(node.meta.get("module", ""))
    parameters = tuple(replace(spec, names=tuple(map(other, spec.names))) for spec in captured.parameters)
    return replace(captured, parameters=parameters, name=next(iter(names.values())))


@pytest.mark.parametrize("names", ODD, ids=lambda names: ascii(names)[:20])
def test_names_are_data_in_exported_code(names: tuple[str, ...]) -> None:
    """Code whose model's, modules' and parameters' names are anything at all is that of plain names."""
    torch.manual_seed(0)
    plain = {f"n{i}": name for i, name in enumerate(names)}
    model, kwargs = Named([*plain]), {"x": torch.randn(8, 4)}
    mesh, captured = make_mesh((1, 1)), capture(model, (), kwargs)
    plan = replace(random_plan(captured, make_mesh((2, 2)), random.Random(0)), mesh=mesh)
    calls = called_names(generate(emit(captured, plan)))
    results, gradients = outputs_and_gradients(emit(captured, plan), model, kwargs, None)
    odd = renamed(captured, plain)
    local = emit(odd, replace(plan, model=odd.name, fingerprint=odd.fingerprint))
    source = generate(local)
    torch.manual_seed(0)
    exported, exported_gradients = outputs_and_gradients(local, Named([*names]), kwargs, source)
    assert torch.equal(results[0], exported[0]) and len(gradients) == 3 * len(names)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients, exported_gradients, strict=True) if a is not None and b is not None
    )
    ours = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert {name for name in called_names(source) if name not in ours} <= {*calls, "block", "range", "enumerate"}
    ast.parse(training_script(odd, replace(one_stage(plan), model=odd.name), ("model",), {}))


def called_names(source: str) -> list[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.id for call in calls if isinstance(call, ast.Name)]


@pytest.mark.parametrize("seed", range(3))
def test_the_code_holds_the_collectives_that_the_graph_holds(seed: int) -> None:
    captured = captured_of("gpt2")
    local = emit(captured, random_plan(captured, make_mesh((2, 2)), random.Random(seed)))
    found = called_names(generate(local))
    # A random plan gives every layer a function of its own, so each call stands in the code once.
    assert all(len(group) == 1 for group in sections(local).classes)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "local_slice"):
        in_graph = sum(getattr(node.target, "__name__", "") == name for node in local.graph.nodes)
        assert found.count(name) == in_graph > 0, name


def test_one_function_a_kind_of_block_called_once_a_layer() -> None:
    captured = captured_of("llama")
    source = generate(emit(captured, uniform_plan(captured, make_mesh((2, 2)))))
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert functions == ["model_layers", "forward"]
    assert "for i in range(2):" in source
    assert 'hidden = model_layers(hidden, cos, sin, **block(w, f"model.layers.{i}", MODEL_LAYERS))' in source.replace(
        "h_rotary_emb, h_rotary_emb_2", "cos, sin"
    )
    assert re.search(r'all_gather\(\w*w_q_proj, dim=0, axis="data"', source)
    assert '"w_q_proj": "self_attn.q_proj.weight"' in source


@pytest.mark.parametrize("family", FAMILIES[::2])
def test_exported_code_is_readable_and_needs_torch_and_the_runtime_alone(family: str) -> None:
    captured = captured_of(family)
    source = generate(emit(captured, uniform_plan(captured, make_mesh((4,)))))
    tree = ast.parse(source)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules <= {"torch", "torch.nn", "autopar.runtime"}
    assert "torch.ops." not in re.sub(r"torch\.ops\.aten\n", "", source)
    assert max(map(len, source.splitlines())) <= 120
    assert source.count("aten.") <= (9 if family in ("t5", "whisper") else 3)


def test_limits_of_integers_come_from_their_readers() -> None:
    captured = captured_of("gpt2")
    local = emit(captured, uniform_plan(captured, make_mesh((1,))))
    assert index_limits(local.captured) == {"input_ids": 101, "labels": 101}


def export_of(
    family: str, folder: Path, shape: tuple[int, ...], seed: int = 0
) -> tuple[nn.Module, dict[str, Any], LocalModel]:
    model, kwargs = zoo(family, dropout=0.1)
    captured = with_dropout(family)
    plan = random_plan(captured, make_mesh(shape), random.Random(seed))
    local = emit(captured, plan)
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    own = model_plan(one_stage(plan), captured=captured, call=Call(kwargs=kwargs))
    export_folder(folder, captured, [local], own, values)
    return model, kwargs, local


def _exported_against_graph(folder: str, family: str) -> list[tuple[float, float, bool]]:
    """On one of four ranks: loss and gradients of the folder and of the graph, in training and in evaluation."""
    import importlib.util

    from autopar.runtime import DistributedModule

    model, kwargs, local = export_of(family, Path(folder) / f"own{os.environ['RANK']}", (2, 2))
    values = {**parameters_of(local.captured, model), **buffers_of(local.captured, model)}
    named = {name: values[p.placeholder].detach() for p in local.captured.parameters for name in p.names}
    spec = importlib.util.spec_from_file_location("exported_model", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules["exported_model"] = code
    spec.loader.exec_module(code)
    whole = DistributedModule(local, values, seed=3)
    exported = load_exported(folder, [code.forward], lambda name, shape, dtype: named[name], seed=3)
    out = []
    for training in (True, False):
        losses = []
        for module in (whole, exported):
            module.train(training)
            loss = module(**kwargs).loss
            module.zero_grad()
            loss.backward()
            losses.append(loss.item())
        gradients = [
            torch.equal(a, b)
            for p in local.captured.parameters
            if (a := whole.local_gradient(p.placeholder)) is not None
            and (b := exported.local_gradient(p.placeholder)) is not None
        ]
        out.append((losses[0], losses[1], all(gradients) and len(gradients) > 0))
    return out


@pytest.mark.parametrize("family", ["resnet"])
def test_four_processes_run_exported_code_as_the_graph(tmp_path: Path, family: str) -> None:
    export_of(family, tmp_path, (2, 2))
    for (train, exported, equal), (evaluated, exported_evaluated, equal_evaluated) in ranks(4).run(
        _exported_against_graph, str(tmp_path), family
    ):
        assert train == exported and equal
        assert evaluated == exported_evaluated and equal_evaluated
        assert train != evaluated, "dropout or batch statistics must be out of the evaluated loss"


def test_train_py_runs_from_its_folder(tmp_path: Path) -> None:
    """As its first lines say, with neither transformers nor the model's source at hand; what was saved goes on."""
    export_of("whisper", tmp_path, (2,))
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json", "model.py", "specs.json", "state.pt", "train.py"}
    (tmp_path / "transformers.py").write_text("raise ImportError('exported code must not need transformers')")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *TRAINING]
    environment = os.environ | NUM_STEPS | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-9000:]
    lines = printed(done.stdout)
    assert len(lines) == 3 and all(0 < float(line.split()[-1]) < 20 for line in lines)
    assert latest(tmp_path / "saved") == 3
    shutil.rmtree(tmp_path / "saved" / "step-00000003")
    # Again on copies of a process that has imported torch: what a launcher does was seen.
    (code, output), (other, _) = run_apart(2, _train_resumed, str(tmp_path))
    assert code == other == 0 and printed(output) == lines[2:]


TRAINING = ["train.py", "--checkpoint", "saved", "--every", "2"]
NUM_STEPS = {"NUM_STEPS": "3"}


def printed(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step")]


def _train_resumed(tell: Callable[[str], None], folder: str) -> None:
    """On a rank: what `train.py --resume` prints."""
    os.chdir(folder)
    os.environ.update(NUM_STEPS)
    sys.path.insert(0, folder)
    sys.argv = [*TRAINING, "--resume"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path("train.py", run_name="__main__")
    tell(output.getvalue())


def test_what_lies_beside_the_code_is_what_it_was_written_with(tmp_path: Path) -> None:
    """Another plan, though legal, or other values would compute another model without a word."""
    export_of("llama", tmp_path, (2,))
    kept = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def refused(name: str, content: bytes | None, message: str) -> None:
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(PlanMismatchError, match=message):
            load_exported(tmp_path, [lambda w: None], lambda *_: torch.zeros(()))
        (tmp_path / name).write_bytes(kept[tmp_path / name])

    refused("specs.json", None, r"specs.json cannot be read .*; export the model again")
    refused("state.pt", None, "missing, or not as it was written")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = io.BytesIO()
    torch.save({name: value + 1 for name, value in state.items()}, other)
    refused("state.pt", other.getvalue(), "not as it was written")
    plan = json.loads(kept[tmp_path / "plan.json"])
    plan["mesh"]["names"] = ["other"]
    refused("plan.json", json.dumps(plan).encode(), "not the plan that the code beside it was written for")


class Called(nn.Module):
    """Inputs named as what generated code has a use for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, w: Tensor, aten: Tensor, torch: Tensor, F: Tensor, input: Tensor, mean: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.up(w + aten) * torch, F + input * mean)


def test_inputs_are_called_as_nothing_else_is_in_exported_code() -> None:
    model, kwargs = Called(), {name: torch.randn(8, 4) for name in ("w", "aten", "torch", "F", "input", "mean")}
    captured = capture(model, (), kwargs)
    local = emit(captured, replace(random_plan(captured, make_mesh((2, 2)), random.Random(1)), mesh=make_mesh((1, 1))))
    source = generate(local)
    own, _ = outputs_and_gradients(local, model, kwargs, None)
    exported, _ = outputs_and_gradients(local, model, kwargs, source)
    assert torch.equal(own[0], exported[0])


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"cannot export to .*; choose a folder"):
        export_of("vit", tmp_path / "file" / "out", (2,))


def test_plan_json_of_an_export_loads(tmp_path: Path) -> None:
    export_of("vit", tmp_path, (2,))
    body = json.loads((tmp_path / "plan.json").read_text())
    assert body["call"]["kwargs"]["dict"]["labels"] == {"tensor": [8], "dtype": "int64"}


def test_a_plan_that_exchanges_heads_for_sequence_shows_all_to_all() -> None:
    """Ulysses: every layer's attention is entered and left by all-to-all, in the graph and in the code."""
    captured = captured_of("bert")
    plan = make_baseline("ulysses", captured, load_cluster("4xcpu"), make_mesh((2, 2)), TrainConfig())
    local = emit(captured, plan)
    exchanges = [node for node in local.graph.nodes if getattr(node.target, "__name__", "") == "all_to_all"]
    assert len(exchanges) == 2 * 4, "q, k, v in and the result out, for each of two layers"
    assert all(node.kwargs["axis"] == "model" for node in exchanges)
    assert "all_to_all(" in generate(local)
