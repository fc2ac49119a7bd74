"""The exported train.py: a plain loop with synthetic data, for its reader to change."""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.export.naming import in_words, quoted
from autopar.export.synthetic import synthetic
from autopar.values.graph import CapturedModel, operands
from autopar.values.plan import Plan
from autopar.values.train_config import FUSED

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)",
    "adam": "torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)",
    "sgd": "torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)",
    "sgd-momentum": "torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)",
}
OPTIMIZERS |= {name + FUSED: made.removesuffix(")") + ", fused=True)" for name, made in OPTIMIZERS.items()}

TEMPLATE = '''"""Train {model} on {mesh}:

    torchrun --nproc-per-node {size} train.py --checkpoint runs/first --resume

Written by autopar export, for you to change. Needs torch and autopar.runtime, and the files beside it: the model itself
is {files}, what each rank holds is in plan.json.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from autopar.runtime import finish_saving, init, latest, load, load_exported, save

{imports}

NUM_STEPS = int(os.environ.get("NUM_STEPS", "20"))
LEARNING_RATE = 1e-3
HERE = Path(__file__).resolve().parent


def initial(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values to start from. To start from a state dict: module.load_state_dict(...) below."""
    if len(shape) < 2:
        return torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype) * 0.02


def batches():
    """SYNTHETIC DATA. Put your own here: global batches, the same on every rank{slices}"""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        yield {batch}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", help="save below this folder, which all ranks share")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    given = parser.parse_args()
    if given.resume and not given.checkpoint:
        parser.error("--resume needs --checkpoint")
    return given


def main() -> None:
    given = arguments()
    init()
    torch.manual_seed(0)
    module = load_exported(HERE, {code}, initial)
    optimizer = {optimizer}
    done = 0
    if given.checkpoint and latest(given.checkpoint) is not None:
        if not given.resume:
            raise SystemExit(f"{{given.checkpoint}} holds a run; add --resume to go on with it, or give another folder")
        done = load(module, optimizer, given.checkpoint).step
    for step, batch in enumerate(batches(), start=1):
        if step <= done:  # a loader with state_dict() is better: save(..., data=loader), load(..., data=loader)
            continue
        loss = {call}
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {{step}}: loss {{loss.item():.6f}}", flush=True)
        if given.checkpoint and (step % given.every == 0 or step == NUM_STEPS):
            save(module, optimizer, given.checkpoint, step=step, asynchronous=True)
    finish_saving()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


SLICES = """; each rank takes its slices.

    (`module.local_batch(batch)` cuts a batch that you have whole; slices alone are given as `autopar.LocalBatch`.)
    """


def training_script(
    captured: CapturedModel, plan: Plan, names: Sequence[str], examples: Mapping[str, torch.Tensor]
) -> str:
    """The source of train.py.

    names: of the files of code, a stage each.
    examples: inputs that the model was planned with, by path, which the synthetic data are like.
    """
    is_whole = plan.num_stages == 1
    batch, call = _step(captured, examples, always_in_parts=not is_whole)
    return TEMPLATE.format(
        model=in_words(plan.model),
        mesh=in_words(plan.arrangement) + ("" if is_whole else f", schedule {plan.schedule}"),
        size=plan.world,
        files=f"{names[0]}.py" if is_whole else f"{names[0]}.py to {names[-1]}.py",
        imports="\n".join(f"import {name}" for name in names),
        code=f"[{', '.join(f'{name}.forward' for name in names)}]",
        slices=SLICES if is_whole else ".",
        batch=batch,
        optimizer=OPTIMIZERS[plan.config.optimizer],
        call=call,
    )


def _step(captured: CapturedModel, examples: Mapping[str, torch.Tensor], *, always_in_parts: bool) -> tuple[str, str]:
    """Sources of a global batch, and of the loss of a step on it with the backward pass."""
    limits = index_limits(captured)
    paths = [spec.path for spec in captured.inputs]
    values = [
        synthetic(
            _whole(spec.shape, captured.microbatches),
            spec.dtype,
            limits.get(spec.placeholder),
            examples.get(spec.path),
        )
        for spec in captured.inputs
    ]
    space = "\n" + " " * 12
    if all(path.isdigit() for path in paths):
        ordered = [value for _, value in sorted(zip(map(int, paths), values, strict=True))]
        batch, call, plain = (
            "(" + "".join(f"{space}{value}," for value in ordered) + "\n        )",
            "module(*batch).loss",
            True,
        )
    else:
        plain = all(path.isidentifier() for path in paths)
        keys = paths if plain else [spec.placeholder for spec in captured.inputs]
        rows = [f"{space}{quoted(key)}: {value}," for key, value in zip(keys, values, strict=True)]
        # Nested or mixed arguments are given by the names that forward in model.py has for them.
        batch, call = "{" + "".join(rows) + "\n        }", "module(**batch).loss" if plain else "module.run(batch)"
    if captured.microbatches > 1 or always_in_parts:  # each runs backward before the next begins
        return batch, "module.train_step(batch)" if plain else "module.step(batch)"
    return batch, f"{call}\n        loss.backward()"


def _whole(shape: tuple[int, ...], microbatches: int) -> tuple[int, ...]:
    """The shape of an input of all micro-batches."""
    return (shape[0] * microbatches, *shape[1:]) if shape else shape


def index_limits(captured: CapturedModel) -> dict[str, int]:
    """For integer inputs, how many values their first reader knows: rows of an embedding, classes of a loss."""
    limits: dict[str, int] = {}
    for spec in captured.inputs:
        if not spec.dtype.is_floating_point and (limit := _limit(captured.nodes[spec.placeholder])) is not None:
            limits[spec.placeholder] = limit
    return limits


def _limit(node: fx.Node, seen: int = 0) -> int | None:
    found = []
    for user in node.users:
        name = str(getattr(user.target, "__name__", user.target))
        sources = operands(user)
        if "embedding" in name and sources[-1] is node:
            found.append(int(sources[0].meta["val"].shape[0]))
        elif "cross_entropy" in name or "nll_loss" in name:
            logits = sources[0].meta["val"]
            found.append(int(logits.shape[-1]))
        elif seen < 8 and isinstance(user.meta.get("val"), torch.Tensor) and not user.meta["val"].is_floating_point():
            inner = _limit(user, seen + 1)
            found += [inner] if inner is not None else []
    return min(found) if found else None
