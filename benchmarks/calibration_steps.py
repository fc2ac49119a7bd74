"""What the processes of `benchmarks.calibration` do: calibrate, measure afresh, and train plans of a small Llama."""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.calibration.measure import Effort, Measuring
from autopar.calibration.samples import Measurements
from autopar.lower.emit import emit
from autopar.runtime import DistributedModule
from autopar.values.graph import CapturedModel
from autopar.values.plan_file import plan_from_json
from autopar.values.serialize import load

PARTS = ("forward", "backward", "optimizer", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is measured. folder: holds captured, tensors.pt and plans, as the benchmark wrote them.

    turns: of "calibration", "fresh" and "steps", in the order in which rounds are made.
    """

    folder: str
    calibration: Effort
    fresh: Effort
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """steps: plan -> part of the step -> seconds a round, the slowest rank's."""

    calibration: Measurements
    fresh: Measurements
    steps: dict[str, dict[str, list[float]]]


def small_llama(hidden: int, layers: int, seq: int, batch: int, vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """A Llama of transformers in fp32, and the keywords of one call."""
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
    )
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (batch, seq))
    return hf.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids, "use_cache": False}


def measure_all(work: Work, tell: Callable[[str], None]) -> Seen:
    """Calibration, fresh measurements and steps, in turns."""
    calibration, fresh, steps = Measuring(work.calibration, tell), Measuring(work.fresh, tell), Steps(Path(work.folder))
    for number, turn in enumerate(work.turns):

        def say(text: str, number: int = number, turn: str = turn) -> None:
            tell(f"turn {number + 1} of {len(work.turns)}, {turn}: {text}")

        {"calibration": calibration.run, "fresh": fresh.run, "steps": steps.run}[turn](say)
    return Seen(calibration=calibration.result(), fresh=fresh.result(), steps=steps.measured)


class Steps:
    """Modules of several plans that take turns, so that noise hits all alike."""

    def __init__(self, folder: Path) -> None:
        captured: CapturedModel = load((folder / "captured").read_bytes())
        tensors = torch.load(folder / "tensors.pt", weights_only=True, mmap=True)
        self.inputs: dict[str, Tensor] = tensors["inputs"]
        self.modules: dict[str, tuple[DistributedModule, torch.optim.Optimizer]] = {}
        for label, text in pickle.loads((folder / "plans").read_bytes()).items():
            local = emit(captured, plan_from_json(text).single)
            module = DistributedModule(local, tensors["values"], sync=False, seed=0)
            self.modules[label] = module, torch.optim.AdamW(module.parameters(), lr=1e-4)
        self.measured: dict[str, dict[str, list[float]]] = {
            label: {part: [] for part in PARTS} for label in self.modules
        }
        for module, optimizer in self.modules.values():
            _one_step(module, optimizer, self.inputs)  # allocator, optimizer state

    def run(self, tell: Callable[[str], None]) -> None:
        """One step of each."""
        for label, (module, optimizer) in self.modules.items():
            tell(label)
            for part, seconds in _one_step(module, optimizer, self.inputs).items():
                self.measured[label][part].append(seconds)


def _one_step(
    module: DistributedModule, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]
) -> dict[str, float]:
    dist.barrier()
    times = [time.perf_counter()]
    loss = module.run(inputs)
    times.append(time.perf_counter())
    torch.autograd.backward(loss)
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    spans = [after - before for before, after in pairwise(times)]
    slowest = torch.tensor([*spans, times[-1] - times[0]], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(PARTS, slowest.tolist(), strict=True))
