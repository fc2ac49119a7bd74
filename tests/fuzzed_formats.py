"""Which files are fuzzed (`fuzz_files`), and what is right of a mutant that is one? An oracle a format.

Each format is a function that gives a valid file's body, how it is written, and what a file is: its answer, or an
AssertionError if what it does is not what the model or the cluster does.
"""

import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api.model_plan import ModelPlan, load_plan, model_plan
from autopar.capture import capture
from autopar.errors import PlanFileError, PlanMismatchError
from autopar.models import spec
from autopar.models.hf import load_config
from autopar.passes.promote_casts import promote_casts
from autopar.passes.split_stages import split_stages
from autopar.runtime.exported import SPECS
from autopar.search.known.random_plan import (
    random_buckets,
    random_cuts,
    random_plan,
    random_recompute,
    random_staged_plan,
    random_ways,
)
from autopar.values.calls import Call
from autopar.values.cluster import cluster_toml, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.pins_file import load_pins
from autopar.values.plan import Plan, one_stage
from autopar.values.schema import checked
from autopar.values.specs_file import load_specs
from autopar.values.train_config import TrainConfig
from tests.fuzzed_checkpoints import index, manifest, sealed_manifest
from tests.plans_in_threads import Reference, errors_of, one_process
from tests.stages_in_threads import staged_error_of

Format = tuple[Any, Callable[[Any], str], Callable[[Path], str]]
MOST_RANKS = 8
"""Of a mutant that is run; plans of more ranks are made ready and not run."""


class Net(nn.Module):
    """A weight used twice, a buffer, a constant, and sums over what plans split."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(x + self.down(torch.tanh(self.up(x)))) * self.scale
        return F.mse_loss(x, y + torch.arange(8, dtype=y.dtype))


@cache
def subject() -> tuple[CapturedModel, Reference, Call]:
    """The model's graph, one process, and the call."""
    torch.manual_seed(0)
    model = Net().double()
    kwargs = {"x": torch.randn(8, 8, dtype=torch.float64), "y": torch.randn(8, 8, dtype=torch.float64)}
    captured = promote_casts(capture(model, (), kwargs))
    return captured, one_process(captured, model, kwargs), Call(kwargs=kwargs)


def plan() -> Format:
    """A plan of one stage with all that a plan can have."""
    captured, reference, call = subject()
    for seed in range(50):
        rng = random.Random(seed)
        own = random_recompute(random_plan(captured, make_mesh((2, 2)), rng), captured, rng, share=0.3)
        own = random_buckets(random_ways(own, captured, rng), captured, rng)
        if own.recompute and own.remade and own.buckets and own.ways:
            break
    assert own.recompute and own.remade and own.buckets and own.ways
    body = json.loads(_saved(one_stage(own), captured, call).to_json())

    def answer(path: Path) -> str:
        found = _loaded(path, captured)
        loss, gradient, name = errors_of(reference, found.single)
        assert loss <= 1e-10 and gradient <= 1e-8, f"loss off by {loss}, gradient of {name} by {gradient}"
        return "right"

    return body, json.dumps, answer


def staged() -> Format:
    """A plan of two stages."""
    captured, reference, call = subject()
    rng = random.Random(3)
    own = random_staged_plan(captured, make_mesh((2,)), "gpipe", 2, random_cuts(captured, 2, rng), rng)
    body = json.loads(_saved(own, captured, call).to_json())

    def answer(path: Path) -> str:
        found = _loaded(path, captured)
        error, name = staged_error_of(reference, split_stages(captured, found.cuts), found)
        assert error <= 1e-8, f"{name} off by {error}"
        return "right"

    return body, json.dumps, answer


def _saved(own: Plan, captured: CapturedModel, call: Call) -> ModelPlan:
    source: Mapping[str, Any] = {
        "spec": "os:system", "batch": 8, "seq": None, "overrides": {"command": "touch ran"}, "precision": "fp64"
    }  # fmt: skip
    return model_plan(
        replace(own, config=replace(own.config, precision="fp64")), captured=captured, call=call, source=source
    )


def _loaded(path: Path, captured: CapturedModel) -> ModelPlan:
    """The plan of a file, if it is one for the model; as far as `bind` goes, which would capture it again."""
    runs = AssertionError("reading a plan imports or runs what it names")
    with mock.patch.object(spec, "load_model", side_effect=runs), mock.patch.object(os, "system", side_effect=runs):
        found = load_plan(path)
        str(found)
    if found.config.precision != "fp64":
        raise PlanMismatchError("of another precision is another graph")
    found.check(captured)
    bound = replace(found, captured=captured)
    str(bound)
    assert bound.world == sum(stage.mesh.size for stage in found.stages) or found.num_stages != found.pipeline
    if bound.world > MOST_RANKS:
        raise PlanMismatchError("too many ranks to be run here")
    return bound


def cluster() -> Format:
    """A cluster file with all that one can have."""
    body: dict[str, Any] = {
        "name": "mine", "library": "nccl",
        "device": {
            "name": "d", "memory_bytes": 80_000_000_000, "memory_bandwidth": {"value": 3e12, "source": "a table"},
            "launch_seconds": 5e-6, "efficiency": 0.8, "attention": 2.0, "replay_launches": 1.0,
            "peak_flops": {"bf16": 9e14, "fp32": {"value": 6e13, "source": "a table"}},
        },
        "levels": [
            {
                "name": "slow", "size": 3, "alpha": 1e-5, "bandwidth": 2e10, "launch": 1e-6, "line_rate": 5e10,
                "skew": 0.0, "devices_per_link": 2, "scope": "network", "source": "measured",
                "in_network": {"alpha": 1e-6, "bandwidth": 1e10},
                "lines": [
                    {"alpha": 1e-6, "bandwidth": 1e9, "kind": "all_gather", "up_to": 1e5, "protocol": "ll"},
                    {"alpha": 1e-5, "bandwidth": 3e10, "kind": "all_gather", "above": 1e5, "protocol": "simple"},
                ],
            },
            {"link": "nvlink4", "size": 8, "alpha": 1e-6},
        ],
    }  # fmt: skip

    def answer(path: Path) -> str:
        found = load_cluster(path)
        again = path.with_suffix(".again.toml")
        again.write_text(cluster_toml(found), encoding="utf-8")
        assert load_cluster(again) == found, "what was written is read as another cluster"
        return "right"

    return body, toml_of, answer


def pins() -> Format:
    """A file of pins of all kinds; what was read is what is read of a plan that records it."""
    body = {
        "pins": {
            "*.attn.*": {"model": "heads", "recompute": False},
            "model.layers.0-3": {"data": ["batch", "whole"]},
            "*embed*": "replicate",
            "input:x": {"data": "shard(0)"},
            "*.weight": "step",
        },
        "forbid": ["sequence parallel"],
        "demand": ["data parallel"],
    }

    def answer(path: Path) -> str:
        found = load_pins(path)
        config = TrainConfig(pins=found)
        assert checked(TrainConfig, asdict(config), "pins", PlanFileError, "") == config
        return "right"

    return body, toml_of, answer


def specs() -> Format:
    """An exported folder's specs.json."""
    captured, _, call = subject()
    own = _saved(one_stage(random_plan(captured, make_mesh((2,)), random.Random(0))), captured, call)
    with tempfile.TemporaryDirectory() as folder:
        own.export(folder)
        body, valid = json.loads((Path(folder) / SPECS).read_text()), load_specs(Path(folder) / SPECS)

    def answer(path: Path) -> str:
        assert load_specs(path) == valid, "other specs under the same digest"
        return "right"

    return body, json.dumps, answer


def config() -> Format:
    """A transformers config.json, on the meta device; sizes stay small, for a config may ask for what it likes."""
    body = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "torch_dtype": "float32",
    }  # fmt: skip

    def answer(path: Path) -> str:
        with mock.patch.object(os, "system", side_effect=AssertionError("a config runs what it names")):
            load_config(path, {})
        return "right"

    return body, json.dumps, answer


def toml_of(value: Any) -> str:
    """A body as TOML, tables inline; what TOML has no word for as a word that it has none for."""
    if not isinstance(value, dict):
        return inline(value)
    return "".join(f"{json.dumps(str(key), ensure_ascii=False)} = {inline(one)}\n" for key, one in value.items())


def inline(value: Any) -> str:
    """A TOML value."""
    match value:
        case dict():
            inside = ", ".join(f"{json.dumps(str(k), ensure_ascii=False)} = {inline(v)}" for k, v in value.items())
            return f"{{ {inside} }}"
        case list():
            return f"[{', '.join(map(inline, value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool() | None:
            return json.dumps(value)
        case float():
            return repr(value).replace("e+", "e")
    return repr(value)


FORMATS: dict[str, Callable[[], Format]] = {
    "plan": plan,
    "staged": staged,
    "cluster": cluster,
    "pins": pins,
    "specs": specs,
    "config": config,
    "manifest": manifest,
    "sealed": sealed_manifest,
    "index": index,
}
