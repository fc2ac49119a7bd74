"""How does the time of a capture grow with layers? Llama-3-8B's block, traced by torch.export where that is needed.

    python -m benchmarks.capture_time [--layers 8,32,128] [--traced 32] [--batch 64]

A row: seconds in which the layers that are alike are found; how many times as long a run of every layer takes as one
of those that no other stands for (`autopar/capture/stand_ins.py`); seconds of the whole capture; and, up to `--traced`
layers, how many times as long it takes if every layer is traced. All in one process, one after the other.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.capture import alike_layers, capture
from autopar.capture.fake_twin import fake_twin, new_inputs
from autopar.capture.layer_traces import FEW, stacks_of, trace_layers
from autopar.capture.loss import LossModule
from autopar.models import load_model
from autopar.values.inputs import flatten_inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,32,128")
    parser.add_argument("--traced", type=int, default=32, help="of no more layers all are traced as well")
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    table = Table("layers", "alike found, s", "every layer run", "capture, s", "every layer traced")
    for layers in map(int, arguments.layers.split(",")):
        table.add_row(*row(layers, arguments.batch, trace_all=layers <= arguments.traced))
    Console(width=120).print(table)


def row(layers: int, batch: int, *, trace_all: bool) -> list[str]:
    loaded = load_model(
        spec="hf:examples/llama3_8b/config.json",
        batch=batch,
        seq=8192,
        overrides={"num_hidden_layers": str(layers)},
        precision="bf16",
        device="meta",
    )
    model, kwargs = loaded.model.to(torch.bfloat16), loaded.kwargs
    seconds(lambda: alike_layers(model, (), kwargs))  # what is done once
    found = seconds(lambda: alike_layers(model, (), kwargs))
    alone = seconds(lambda: traced(model, kwargs, stand_in=True))
    every = seconds(lambda: traced(model, kwargs, stand_in=False))
    whole = seconds(lambda: capture(model, (), kwargs))
    plain = seconds(lambda: capture(model, (), kwargs, repeats=())) if trace_all else None
    shown = [str(layers), f"{found:.1f}", f"{every / alone:.1f} x", f"{whole:.1f}"]
    return [*shown, "" if plain is None else f"{plain / whole:.1f} x"]


def traced(model: nn.Module, kwargs: Mapping[str, Any], *, stand_in: bool) -> None:
    """One run of all layers, or of those that no other stands for."""
    named, rebuild = flatten_inputs((), kwargs)
    module = LossModule(model, [leaf for _, leaf in named], rebuild, None)
    stacks = [path for path, stack in stacks_of(model).items() if len(list(stack.children())) >= FEW]
    with fake_twin(model) as mode, torch.enable_grad():
        inputs = new_inputs(mode, [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)])
        with mode:
            trace_layers(model, lambda: module(*inputs), stacks, stand_in=stand_in)


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
