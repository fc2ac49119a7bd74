"""Does a distributed module return what the model returns: in evaluation, on other rows, before and after training?

    python -m benchmarks.verify_calls [--models gpt2,noisy] [--plans 5] [--seed 0]

Tiny float64 models (tests/zoo.py, tests/calling_models.py) on 4 Gloo processes, under random plans on a 2x2 mesh and
one in two stages, before a training step (with SGD's update but where the model draws numbers in training) and after
it. A row a model; exit code 1 if any output of any rank is off. Outputs are compared with the module itself: 1e-9
(relative to the tensor's largest entry), 1e-4 where the model computes in float32, as a whole or inside.
"""

import argparse
import random
import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from autopar.api.again import Again
from autopar.capture import capture
from autopar.capture.loss import find_loss
from autopar.errors import AutoparError
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.split_stages import split_stages
from autopar.runtime import distributed_module
from autopar.search.known.random_plan import random_cuts, random_plan, random_staged_plan
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from autopar.values.inputs import leaves_of
from autopar.values.mesh import make_mesh
from autopar.values.outputs import flatten_outputs
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.train_config import TrainConfig
from tests.calling_models import MODELS, call, made
from tests.process_group import ranks
from tests.zoo import FAMILIES, zoo

ROWS = (8, 1, 5)


def model_of(name: str, seed: int = 0, rows: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    if name in MODELS:
        return made(name), call(seed, rows)
    model = zoo(name, dtype=dtype_of(name))[0]
    return model, zoo(name, dtype=dtype_of(name), batch=rows, seed=seed)[1]


def dtype_of(name: str) -> torch.dtype:
    """Float64, float32 where torch's kernels have no other."""
    return torch.float32 if name == "mixtral" else torch.float64


def config_of(name: str) -> TrainConfig:
    return TrainConfig(precision="fp32" if dtype_of(name) is torch.float32 else "fp64")


def plans_of(name: str, captured: CapturedModel, count: int, seed: int) -> list[str]:
    rng = random.Random(f"{name} {seed}")
    drawn = [replace(random_plan(captured, make_mesh((2, 2)), rng), config=config_of(name)) for _ in range(count)]
    texts = [one_stage(plan).to_json() for plan in drawn]
    try:
        cuts = random_cuts(captured, 2, rng)
        split_stages(captured, cuts)
    except AutoparError:
        return texts
    return [
        *texts,
        replace(random_staged_plan(captured, make_mesh((2,)), "gpipe", 2, cuts, rng), config=config_of(name)).to_json(),
    ]


def on_a_rank(name: str, text: str, draws: bool) -> tuple[float, str]:
    """The largest error of an output, or why the calls were refused."""
    own, kwargs = model_of(name)
    eager = model_of(name)[0]
    captured = capture(own, (), kwargs)
    values = {**parameters_of(captured, own), **buffers_of(captured, own)}
    given = Call(kwargs=kwargs)
    plan = plan_from_json(text)
    parts = split_stages(captured, plan.cuts)
    captor = Again(model=own, plans=plan.stages, planned=parts, precision=config_of(name).precision, call=given)
    module = distributed_module(captured, plan, values, captor=captor)
    worst = 0.0
    try:
        for step in range(2):
            module.eval()
            eager.eval()
            for rows in ROWS:
                data = model_of(name, step + 1, rows)[1]
                with torch.no_grad():
                    worst = max(worst, error(module(**data), eager(**data)))
            if step:
                break
            module.train()
            eager.train()
            find_loss(eager(**kwargs)).backward()  # writes buffers
            module.train_step(kwargs)
            for parameters in ([*model.parameters()] for model in (module, eager)):
                if parameters and not draws:  # a stage may have none
                    torch.optim.SGD(parameters, lr=1e-3).step()
    except AutoparError as problem:
        return float("nan"), f"{type(problem).__name__}: {problem}"
    return worst, ""


def is_random(name: str) -> bool:
    """Whether the model draws in training, where ranks draw other numbers than one process does."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, kwargs = model_of(name)
        found.append(float(find_loss(model.train()(**kwargs)).detach()))
    return found[0] != found[1]


def error(found: Any, wanted: Any) -> float:
    """Largest error of any tensor; infinite if anything else differs."""
    own, others = flatten_outputs(found)[0], flatten_outputs(wanted)[0]
    plain = [[leaf for leaf in leaves_of(v) if isinstance(leaf, (int, float, str))] for v in (found, wanted)]
    if type(found) is not type(wanted) or len(own) != len(others) or plain[0] != plain[1]:
        return float("inf")
    return max((_error(a, b) for a, b in zip(own, others, strict=True)), default=0.0)


def _error(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    largest = float(wanted.double().abs().max().clamp_min(1e-12)) if wanted.numel() else 1.0
    return float((found.double() - wanted.double()).abs().max()) / largest if wanted.numel() else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join((*MODELS, *FAMILIES)))
    parser.add_argument("--plans", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    console, failed = Console(), 0
    for name in asked.models.split(","):
        model, kwargs = model_of(name)
        captured = capture(model, (), kwargs)
        narrow = any(
            isinstance(v := n.meta.get("val"), Tensor) and v.dtype == torch.float32 for n in captured.graph.nodes
        )
        limit, draws = 1e-4 if narrow else 1e-9, is_random(name)
        found = [max(ranks(4).run(on_a_rank, name, text, draws), key=lambda one: (one[0] != one[0], one[0])) for text in
                 plans_of(name, captured, asked.plans, asked.seed)]  # fmt: skip
        wrong = [one for one in found if not one[0] <= limit]
        failed += len(wrong)
        said = "" if not wrong else wrong[0][1] or f"{wrong[0][0]:.1e}"
        worst = max((one[0] for one in found if one[0] == one[0]), default=0.0)
        console.print(
            f"{name}: {len(found)} plans, {len(wrong)} wrong, largest error {worst:.0e} {said}", soft_wrap=True
        )
    console.print(f"{failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
