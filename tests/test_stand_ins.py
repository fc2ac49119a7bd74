"""What stands for a layer that is not run has its trace; a layer that may do otherwise is run."""

import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import autopar.capture as capturing
from autopar.capture.fake_twin import fake_twin, new_inputs
from autopar.capture.layer_traces import FEW, Traces, stacks_of, trace_layers
from autopar.capture.stand_ins import StandIns
from tests.test_capture_repeats import TEXT, Layer, Stack, both, caching_gpt2, gpt2, resnet, scaled_gpt2, t5


class Asking(Layer):
    """A layer that knows its number: what it does with it is for `how` to say."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.number, self.how, self.calls = number, how, 0
        self.seen: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.how == "counts":
            self.calls += 1
        elif self.how == "remembers":
            self.seen["x"] = 1
        elif (self.how == "uses" and self.number == 4) or (self.how == "looks for" and getattr(self, "number", 0) == 4):
            y = y.sin()
        elif (self.how == "draws" and random.random() < 2.0) or (
            self.how == "draws by NumPy" and np.random.rand() < 2.0
        ):
            y = y + 0.5
        elif self.how == "in place":
            return x.mul_(y)
        return y


def test_stacks_inside_layers_that_are_not_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers are too few to repeat, but alike, so that others stand for most; the nine in each do repeat."""

    class Nest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(Layer() for _ in range(9)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    _, repeats = both(Stack([Nest() for _ in range(6)]), (torch.zeros(2, 4),), {}, monkeypatch)
    assert [(repeat.stack, repeat.copies) for repeat in repeats] == [(f"layers.{i}.inner", 4) for i in range(6)]


class Told(Layer):
    """A layer that looks up in a shared object, or in a list that it is called with, what to do."""

    def __init__(self, told: SimpleNamespace) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: Tensor, seen: list[int] | None = None) -> Tensor:
        if seen is not None:
            seen.append(1)
        y = super().forward(x)
        return y.sin() if self.told.number == 4 or len(seen or ()) == 5 else y


class Telling(nn.Module):
    """Says in a shared object which layer comes next; or calls layers with one list, to which they append."""

    def __init__(self, *, by_list: bool) -> None:
        super().__init__()
        self.told, self.by_list = SimpleNamespace(number=0), by_list
        self.layers = nn.ModuleList(Told(self.told) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        seen: list[int] = []
        for i, layer in enumerate(self.layers):
            self.told.number = 0 if self.by_list else i
            x = layer(x, seen) if self.by_list else layer(x)
        return x.square().mean()


class Idle(Layer):
    """Gives what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Between(nn.Module):
    """After the fifth layer something is computed between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i < 5 else x + 1.0)
        return x.square().mean()


def tied_in_one() -> Stack:
    """Layer 4 has a weight of its own where the others share one."""
    shared = nn.Parameter(torch.ones(4))
    return Stack([Layer(shared=nn.Parameter(torch.ones(4)) if i == 4 else shared) for i in range(9)])


def sliding() -> nn.Module:
    """Every sixth layer attends to all."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 24}
    config = hf.Gemma3TextConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)  # type: ignore[call-arg]
    return hf.Gemma3ForCausalLM(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=9, num_attention_heads=2
    )
    return hf.LlamaForCausalLM(config)


X = ((torch.zeros(2, 4),), dict[str, Any]())
STANDING_FOR_NONE = ("counts", "remembers", "uses", "looks for", "draws", "draws by NumPy")


@pytest.mark.parametrize(
    ("model", "call", "least", "most"),
    [
        (Stack([Layer() for _ in range(9)]), X, 7, 7),
        (Stack([Layer(strange=i % 3 == 1) for i in range(25)]), X, 20, 22),
        (Stack([Asking(i, "nothing") for i in range(9)]), X, 7, 7),
        (Stack([Asking(i, "in place") for i in range(9)]), X, 6, 6),
        (Stack([Layer(), *(Idle() for _ in range(8))]), X, 6, 6),
        *((Stack([Asking(i, how) for i in range(9)]), X, 0, 0) for how in STANDING_FOR_NONE),
        (tied_in_one(), X, 6, 6),
        (Stack([Layer(scale=[0.5, 1.0, 2.0, 4.0]) for _ in range(9)]), X, 0, 0),
        (Between(), X, 3, 3),
        (Telling(by_list=False), X, 0, 0),
        (Telling(by_list=True), X, 0, 0),
        (llama(), ((), TEXT), 7, 7),
        (sliding(), ((), TEXT), 18, 21),
        (gpt2()[0], ((), TEXT), 7, 7),
        (caching_gpt2()[0], ((), caching_gpt2()[1]), 0, 0),
        (scaled_gpt2()[0], ((), TEXT), 0, 0),
        (resnet()[0], ((), resnet()[1]), 6, 8),
        (t5()[0], ((), TEXT), 13, 13),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_stands_for_a_layer_has_its_trace(
    model: nn.Module, call: tuple[Any, dict[str, Any]], least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, kwargs = call
    originals = {name: dict(vars(module)) for name, module in model.named_modules()}

    def traced(stand_in: bool) -> list[Traces]:
        module, tensors = capturing._call(model, args, kwargs, None)
        stacks = [path for path, stack in stacks_of(model).items() if len(list(stack.children())) >= FEW]
        with fake_twin(model) as mode, torch.enable_grad():
            inputs = new_inputs(mode, tensors)
            with mode:
                return trace_layers(model, lambda: module(*inputs), stacks, stand_in=stand_in)

    kept: list[StandIns] = []
    standing = StandIns.standing_in

    def noted(self: StandIns) -> Any:
        kept.append(self)
        return standing(self)

    monkeypatch.setattr(StandIns, "standing_in", noted)
    found = traced(True)
    stood = [layer for own in kept for layer in own.of]
    assert _words(found) == _words(traced(False))
    assert least <= len(stood) <= most
    for name, module in model.named_modules():
        assert vars(module).keys() == originals[name].keys()


def _words(traces: list[Traces]) -> list[tuple[str, list[str]]]:
    """Traces, with tensors from outside numbered as they appear."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found[0], f"('tensor' {len(numbers)})")

    return [(t.stack, [re.sub(r"\('tensor', \d+\)", number, word) for word in (*t.whole, *t.own)]) for t in traces]
