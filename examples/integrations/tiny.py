"""What do the examples of frameworks train, and how are their ranks started? A language model of 10,432 parameters."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autopar

ROOT = Path(__file__).resolve().parents[2]
WORDS, WIDTH, SEQUENCE, HEADS = 32, 32, 16, 4
GLOBAL_BATCH = 8
STEPS_AN_EPOCH = 3
EPOCHS = 2
LEARNING_RATE = 1e-2
TOLERANCE = 1e-6  # of losses in float32, which the order of sums moves by one or two steps of 1.2e-7 of their size


class Tiny(nn.Module):
    """Words to the words that follow them: one block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.before, self.between, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        logits: Tensor = self.head(self.after(x))
        return logits


def tiny() -> Tiny:
    """The same weights in any process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tiny()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Rows of words and of the words after them, always the same."""

    def __init__(self, num_batches: int = STEPS_AN_EPOCH, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, WORDS, (num_batches * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


def planned(world: int) -> autopar.ModelPlan:
    """Four ranks split the batch in two, and heads, columns and words in two; two ranks share parameters out."""
    how = {4: "megatron:tp=2", 2: "fsdp"}[world]
    return autopar.plan(tiny(), example_batch(), cluster=f"{world}xcpu", baseline=how, loss_fn=loss_fn)


def loss_fn(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return loss_of(output, batch[1])


def example_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(GLOBAL_BATCH, SEQUENCE, dtype=torch.int64)
    return tokens, tokens.clone()


def say(**what: object) -> None:
    """One JSON object a line, from rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(what), flush=True)


def on_ranks(world: int, module: str, *arguments: str, timeout_seconds: float = 600.0) -> Iterator[dict[str, Any]]:
    """What rank 0 says of `world` processes that torchrun starts.

    Raises:
        RuntimeError: with the end of what they wrote, if they fail.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*torchrun, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    if done.returncode:
        raise RuntimeError(f"{module} on {world} ranks ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"'))


def in_turn(
    module: str,
    folder: str,
    runs: Sequence[tuple[int, tuple[str, ...]]],
    plan_of: Callable[[int], autopar.ModelPlan] = planned,
) -> dict[str, list[float]]:
    """What rank 0 says in runs of which each goes on from the one before, joined by name.

    Args:
        module: that runs; it is told the file of a plan, a folder for all runs, and what a run is told beside.
        folder: for plans and what the runs save.
        runs: of each the number of ranks, and what it is told beside.
        plan_of: makes the plan for a number of ranks.
    """
    found: dict[str, list[float]] = {}
    for world, arguments in runs:
        plan = Path(folder, f"{world}.json")
        plan_of(world).save(plan)
        for said in on_ranks(world, module, str(plan), f"{folder}/ranks", *arguments):
            for name, values in said.items():
                found.setdefault(name, []).extend(values)
    return found


def agree(framework: str, alone: dict[str, list[float]], found: dict[str, list[float]]) -> bool:
    """Print what a framework alone and 4 ranks, then 2, found, by name; whether all of it agrees to the tolerance."""
    same = alone.keys() == found.keys()
    for name, values in alone.items():
        print(name)
        same &= compare(values, found[name], (f"{framework} alone", "4 ranks, then 2"))
    return same


def compare(one: list[float], other: list[float], names: tuple[str, str]) -> bool:
    """Print both side by side; whether they agree to the tolerance."""
    for step, (a, b) in enumerate(zip(one, other, strict=True), start=1):
        print(f"step {step}: {names[0]} {a:.7f}, {names[1]} {b:.7f}, difference {abs(a - b):.1e}")
    return all(abs(a - b) <= TOLERANCE * max(1.0, abs(a)) for a, b in zip(one, other, strict=True))
