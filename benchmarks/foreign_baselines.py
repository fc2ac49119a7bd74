"""To which foreign models do data parallelism and stages apply, exactly, and what stands in the way of the others?

    python -m benchmarks.foreign_baselines [--only 'timm/test*'] [--jobs 2] [--seconds 120] [--again] [--table FILE]

Each model (`benchmarks.foreign_models`, and the families of tests/zoo.py) in a process of its own: captured at a batch
of 4, planned with `ddp` and `fsdp` on two and on four ranks, cut in two stages in several places. What is planned is
run on ranks that are threads and compared with one process: loss, gradients on every rank, bytes as counted. Verdicts
are appended to a file outside the repository; the table goes to docs/results/baselines.md. Exit code 1 if any is wrong.
"""

import argparse
import fnmatch
import json
import operator
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.api.captures import captured_model
from autopar.errors import AutoparError
from autopar.ops.random import Draws, use_draws
from autopar.passes.promote_casts import promote_casts
from autopar.passes.split_stages import split_stages
from autopar.rules.registry import rule_of
from autopar.search.known.baselines import make_baseline
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel, called_name
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from benchmarks.foreign_check import LOOSE, TIGHT, Foreign, Outcome, in_dtype, made
from benchmarks.foreign_check import calls_of as foreign_calls
from benchmarks.foreign_models import Make, models_of, read, run
from benchmarks.foreign_reasons import reason
from benchmarks.foreign_torchvision import declare_kernels
from tests.plans_in_threads import Reference, errors_of, one_process
from tests.zoo import FAMILIES, zoo

CHOSEN = {
    "zoo": ("*",),
    "small packages": (
        *("conformer", "denoising-diffusion-pytorch", "egnn-pytorch", "entmax, entmax15", "geomloss*", "iTransformer"),
        *("info-nce-pytorch", "isab-pytorch", "kornia, SSIMLoss", "lightly, BarlowTwinsLoss", "lightly, DCLLoss"),
        *("lightly, NTXentLoss", "lightly, VICRegLoss", "lightly, DINOLoss", "linformer", "local-attention"),
        *("mixture-of-experts", "monai, DiceLoss", "monai, UNet", "ncps, CfC", "ncps, LTC", "neuraloperator, FNO"),
        *("nflows, MAF", "normflows, glow", "nystrom-attention", "perceiver-pytorch, Perceiver", "product-key-memory"),
        *("pytorch-crf", "pytorch-metric-learning, *", "pytorch-tabnet", "rtdl, *", "sinkhorn-transformer"),
        *("slot-attention", "snntorch, Leaky", "soft-moe-pytorch", "torch.distributions, *", "uformer-pytorch"),
        *("vector-quantize-pytorch, VQ", "vector-quantize-pytorch, FSQ", "x-transformers*", "zuko, NSF", "zuko, GMM"),
    ),
    "torch-geometric": ("*",),
    "vit-pytorch": ("vit", "cait", "xcit", "max_vit", "regionvit", "na_vit", "cct", "t2t", "mp3", "vivit", "nest"),
    "diffusers": ("UNet2DModel", "UNet2DConditionModel", "DiT*", "Flux*", "AutoencoderKL", "LatteT*", "UNet3D*", "VQ*"),
    "timm": ("test_*", "convit_tiny", "ghostnet_050", "swin_tiny_patch4_window7_224", "mobilevit_xxs", "volo_d1_224"),
    "transformers": ("*Bert*", "*GPT*", "*Mamba*", "*T5*", "*CLIP*", "*Wav2Vec2*", "*Whisper*", "*Time*", "*Llama*"),
}
"""Patterns of names by package."""
RANKS = (2, 4)
NAMES = ("ddp", "fsdp")
CUTS = (0.25, 0.5, 0.75)
"""Where a model is cut in two, in parts of its calls up to the loss."""
RESULTS = Path("/tmp/autopar-foreign-baselines.jsonl")
TABLE = Path(__file__).parent.parent / "docs" / "results" / "baselines.md"
EXACT = "exact"
WHOLE = "whole"
"""Key of the ops that nothing splits."""
LARGEST = 30_000_000
"""Parameters: larger ones do not fit beside their gradients on four ranks in the memory of a process."""
SAID = """Each baseline's plan is run on ranks that are threads and compared with one process: loss, every gradient on
every rank, no more bytes than counted. Stages: cut in two after a quarter, a half and three quarters of the calls
before the loss, run one after the other, compared likewise. Refused is what has a reason in the model; models that are
not captured are left out.
"""


def asked(make: Make) -> Outcome:
    """What applies to one model: for each question `exact`, or why not, as JSON."""
    outcome = _asked(make, torch.float64)
    return _asked(make, torch.float32) if outcome.verdict == "left out" else outcome


def _asked(make: Make, dtype: torch.dtype) -> Outcome:
    precision = "fp64" if dtype is torch.float64 else "fp32"
    try:
        foreign, calls = made(make, dtype), foreign_calls(make, dtype)
        if sum(p.numel() for p in foreign.model.parameters()) > LARGEST:
            return Outcome(verdict="left out", said="large")
        captured, _ = captured_model(foreign.model, calls[0], precision, foreign.loss_fn)
    except Exception as error:  # whatever foreign code does in this dtype
        return Outcome(verdict="left out", said=f"{type(error).__name__}: {str(error)[:200]}")
    size = sum(node.op == "call_function" for node in captured.graph.nodes)
    limits = TIGHT
    try:
        captured = promote_casts(captured)
        foreign.model._apply(lambda value: in_dtype(value, torch.float64))
        reference = one_process(captured, foreign.model, calls[0].in_dtype(torch.float64).tensors())
    except RuntimeError:
        if precision == "fp64":
            raise
        foreign.model._apply(lambda value: in_dtype(value, torch.float32))
        reference, limits = one_process(captured, foreign.model, calls[0].tensors()), LOOSE
    found = {
        f"{name} {ranks}": _baseline(name, ranks, captured, reference, precision, limits)
        for name in NAMES
        for ranks in RANKS
    }
    found |= {f"cut {part}": _cut(part, captured, reference, limits) for part in CUTS}
    return Outcome(verdict="asked", said=json.dumps({**found, WHOLE: whole_ops(captured)}), calls=size)


def whole_ops(captured: CapturedModel) -> str:
    """Ops that depend on inputs and that nothing splits, with how many calls there are of each."""
    batched = {captured.nodes[spec.placeholder] for spec in captured.inputs}
    found: Counter[str] = Counter()
    for node in captured.graph.nodes:
        if node.op == "call_function" and batched.intersection(node.all_input_nodes):
            batched.add(node)
            if node.target is not operator.getitem and not rule_of(node).known:
                found[called_name(node)] += 1
    return ", ".join(f"{op} x{count}" for op, count in found.items())


def _baseline(
    name: str, ranks: int, captured: CapturedModel, reference: Reference, precision: str, limits: tuple[float, float]
) -> str:
    config = TrainConfig(precision="fp64" if limits == TIGHT else precision)
    try:
        plan = make_baseline(name, captured, load_cluster(f"{ranks}xcpu"), make_mesh((ranks,)), config)
    except AutoparError as error:
        return str(error)
    except Exception as error:
        return f"crashed: {type(error).__name__}: {str(error)[:200]}"
    try:
        loss, gradient, parameter = errors_of(reference, plan)
    except Exception as error:
        return f"wrong: {type(error).__name__}: {str(error)[:200]}"
    if loss <= limits[0] and gradient <= limits[1]:
        return EXACT
    return f"wrong: loss off by {loss:.1e}, gradient of {parameter} by {gradient:.1e}"


def _cut(part: float, captured: CapturedModel, reference: Reference, limits: tuple[float, float]) -> str:
    names = [node.name for node in captured.graph.nodes if node.op == "call_function"]
    names = names[: names.index(captured.loss) + 1]
    if len(names) < 2:
        return EXACT
    cut = names[min(max(1, int(part * len(names))), len(names) - 1)]
    try:
        stages = split_stages(captured, (cut,))
    except AutoparError as error:
        return str(error)
    except Exception as error:
        return f"crashed: {type(error).__name__}: {str(error)[:200]}"
    trainable = {p.placeholder for p in captured.parameters if p.trainable}
    parameters = {n: p.detach().clone().requires_grad_(n in trainable) for n, p in reference.parameters.items()}
    try:
        with use_draws(Draws(seed=1, step=0, exact=True)):
            found = one_after_the_other(stages, {**parameters, **reference.buffers, **reference.inputs})
    except Exception as error:
        return f"wrong: {type(error).__name__}: {str(error)[:200]}"
    loss = found[captured.loss]
    loss.backward()  # type: ignore[no-untyped-call]
    largest = max((float(p.grad.abs().max()) for p in reference.parameters.values() if p.grad is not None), default=1.0)
    error = float((loss.detach() - reference.loss).abs() / reference.loss.abs())
    for name in trainable:
        want, got = reference.parameters[name].grad, parameters[name].grad
        if want is not None and want.numel():
            error = max(error, float((want - (0 if got is None else got)).abs().max()) / largest)
    return EXACT if error <= limits[1] else f"wrong: off by {error:.1e}"


def one_after_the_other(stages: Sequence[CapturedModel], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All results by name; every stage sees only its own placeholders and what the one before sent."""
    sent: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for stage in stages:
        names = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
        given = {**values, **stage.constants, **sent}
        results = fx.GraphModule(nn.Module(), stage.graph)(*(given[name] for name in names))
        found.update(zip((*stage.ends, *stage.results), results, strict=True))
        sent = {name: found[name] for name in stage.sends}
    return found


def _zoo() -> dict[str, Make]:
    def family(name: str) -> Make:
        def make() -> Foreign:
            model, kwargs = zoo(name)
            return Foreign(model=model, inputs=lambda: kwargs)

        return make

    return {name: family(name) for name in FAMILIES}


def chosen(only: str) -> list[tuple[str, str, Make]]:
    """(package, name, what makes it) of every model that is asked."""
    found = []
    for package, patterns in CHOSEN.items():
        for name, make in (_zoo() if package == "zoo" else models_of(package)).items():
            if any(fnmatch.fnmatch(name, p) for p in patterns) and _is_asked(f"{package}/{name}", only):
                found.append((package, name, make))
    return found


def _is_asked(name: str, only: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in only.split("|"))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    asked = [row for row in rows if row["verdict"] == "asked"]
    answers = [(f"{row['package']}/{row['model']}", json.loads(row["said"])) for row in asked]
    whole = {name: ops for name, found in answers if (ops := found.pop(WHOLE, ""))}
    questions = list(dict.fromkeys(q for _, found in answers for q in found))
    lines = ["# Baselines of foreign models", "", "`python -m benchmarks.foreign_baselines`", "", SAID]
    lines += ["| asked | models | exact | refused | wrong |", "|---|---:|---:|---:|---:|"]
    for question in questions:
        kinds = [_kind(found[question]) for _, found in answers]
        numbers = " | ".join(str(kinds.count(kind)) for kind in (EXACT, "refused", "wrong"))
        lines.append(f"| {question} | {len(kinds)} | {numbers} |")
    for kind in ("refused", "wrong"):
        groups: dict[str, list[str]] = {}
        for name, found in answers:
            for question, said in found.items():
                if _kind(said) == kind:
                    groups.setdefault(reason(said), []).append(f"{name} ({question})")
        lines += ["", f"## {kind.capitalize()}", ""] if groups else []
        for said, names in sorted(groups.items(), key=lambda item: -len(item[1])):
            lines.append(f"- {len(names)}: {said}: {', '.join(names)}")
    lines += ["", "## Ops that see the batch and that nothing splits", ""]
    lines += [f"- {name}: {ops}" for name, ops in whole.items()] or ["None."]
    lines += ["", f"In {len(whole)} of {len(answers)} models."]
    return "\n".join(lines) + "\n"


def _kind(said: str) -> str:
    return EXACT if said == EXACT else "wrong" if said.startswith(("wrong", "crashed")) else "refused"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="patterns of package/model, | between them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a processor, for one model")
    parser.add_argument("--again", action="store_true", help="also what is in the file of results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    declare_kernels()
    models = chosen(arguments.only)
    known = read(arguments.results)
    waiting = [m for m in models if arguments.again or m[:2] not in known]
    for row in run(waiting, arguments.jobs, arguments.seconds, asked):
        known[row["package"], row["model"]] = row
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['package']}/{row['model']} {row['verdict']}: {row['said']}, {row['seconds']} s", flush=True)
    rows = [known[m[:2]] for m in models if m[:2] in known]
    text = table(rows)
    if arguments.only == "*":
        arguments.table.write_text(text)
    print(text)
    return (
        1
        if any(_kind(v) == "wrong" for r in rows if r["verdict"] == "asked" for v in json.loads(r["said"]).values())
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
