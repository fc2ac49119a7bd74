"""Tracing a few layers and copying the rest gives the graph that tracing all of them gives, or all are traced."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, fx, nn

import autopar.capture as capturing
from autopar.capture import capture
from autopar.capture.repeats import Repeat, longest_repeat
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.values.graph import LABELS, CapturedModel, operands, target_name
from autopar.values.inputs import bind_inputs


def meaning(captured: CapturedModel) -> tuple[Counter[int], int, set[Any]]:
    """Every node as a hash of what it computes, of what, and where; the loss; what each placeholder is."""
    named: dict[str, Any] = {spec.placeholder: ("parameter", spec.names) for spec in captured.parameters}
    named |= {spec.placeholder: ("buffer", spec.names) for spec in captured.buffers}
    named |= {spec.placeholder: ("input", spec.path) for spec in captured.inputs}
    named |= {name: ("constant", str(value)) for name, value in captured.constants.items()}
    words: dict[fx.Node, int] = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        value = node.meta["val"]
        shapes = [(v.shape, v.dtype) for v in (value if isinstance(value, tuple | list) else [value])]
        kwargs = {k: v for k, v in node.kwargs.items() if k not in LABELS}
        constants = str(fx.node.map_arg((node.args, kwargs), lambda _: "tensor"))
        sources = tuple(words[source] for source in operands(node))
        what = named.get(node.name) or (target_name(node.target), constants, node.meta["module"])
        words[node] = hash((what, sources, str(shapes), node.meta["requires_grad"]))
    by_name = {node.name: word for node, word in words.items()}
    held = {(spec.names, spec.shape, spec.dtype, spec.trainable) for spec in captured.parameters} | {
        (spec.names, spec.shape, spec.persistent, by_name.get(spec.mutated_by or "")) for spec in captured.buffers
    }
    every = Counter(word for node, word in words.items() if node.name not in captured.constants)  # copies share one
    return every, by_name[captured.loss], held


def both(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[CapturedModel, tuple[Repeat, ...]]:
    """The captured model, held to the one that traces every layer; and the repeats that were found in it."""
    found: list[tuple[Repeat, ...]] = []
    finder = capturing.find_repeats

    def noted(*arguments: Any) -> tuple[Repeat, ...]:
        found.append(finder(*arguments))
        return found[-1]

    monkeypatch.setattr(capturing, "find_repeats", noted)
    captured = capture(model, args, kwargs)
    if found == [()]:  # then it traced them all itself
        return captured, ()
    monkeypatch.setattr(capturing, "find_repeats", lambda *_: ())
    whole = capture(model, args, kwargs)
    assert meaning(captured) == meaning(whole)
    assert [spec.names for spec in captured.parameters] == [spec.names for spec in whole.parameters]
    sites = [node.kwargs["site"] for node in captured.graph.nodes if "site" in node.kwargs]
    assert len(sites) == len(set(sites)) == len([n for n in whole.graph.nodes if "site" in n.kwargs])
    return captured, found[0] if found else ()


TEXT = {
    "input_ids": torch.zeros(2, 8, dtype=torch.long),
    "labels": torch.zeros(2, 8, dtype=torch.long),
    "use_cache": False,
}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=9, n_embd=16, n_head=2, vocab_size=32, **drops)), TEXT


def caching_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Each layer makes an empty cache of its own, as it does by default."""
    return gpt2()[0], {name: value for name, value in TEXT.items() if name != "use_cache"}


def scaled_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Attention scaled by 1 / (layer + 1): no two layers alike."""
    config = hf.GPT2Config(n_layer=8, n_embd=16, n_head=2, vocab_size=32, scale_attn_by_inverse_layer_idx=True)
    return hf.GPT2LMHeadModel(config), TEXT


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 9]}
    config = hf.ResNetConfig(**sizes, layer_type="basic", num_labels=3)  # type: ignore[call-arg]
    model = hf.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.T5Config(  # type: ignore[call-arg]
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_heads=2,
        vocab_size=32,
        num_layers=9,
        num_decoder_layers=10,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), TEXT


@pytest.mark.parametrize(
    ("build", "copies"),
    [
        (gpt2, [4]),
        (scaled_gpt2, []),
        (t5, [3, 4]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_copied_layers_are_traced_layers(build: Any, copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = build()
    before = {name: id(module) for name, module in model.named_modules()}
    _, repeats = both(model.train(), (), kwargs, monkeypatch)
    assert [repeat.copies for repeat in repeats] == copies
    assert {name: id(module) for name, module in model.named_modules()} == before


class Stack(nn.Module):
    """Layers that add `layer(x, i)`; `collect` reads every layer's output, `shared` is one weight for all."""

    def __init__(self, layers: list[nn.Module], *, collect: bool = False, indexed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.collect, self.indexed = collect, indexed

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for i in range(9) if self.indexed else range(len(self.layers)):
            x = self.layers[i](x)
            seen.append(x)
        return sum(seen).square().mean() if self.collect else x.square().mean()  # type: ignore[union-attr]


class Layer(nn.Module):
    def __init__(
        self, *, strange: bool = False, shared: nn.Parameter | None = None, scale: list[float] | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.strange = strange
        if scale is not None:
            self.scale = torch.tensor(scale)
        if shared is not None:
            self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if hasattr(self, "shared"):
            y = y * self.shared
        if hasattr(self, "scale"):
            y = y * self.scale
        return x + (y.sin() if self.strange else y)


def shared_stack() -> Stack:
    shared = nn.Parameter(torch.ones(4))
    return Stack([Layer(shared=shared) for _ in range(9)])


@pytest.mark.parametrize(
    ("model", "copies"),
    [
        (Stack([Layer() for _ in range(9)]), [4]),
        (Stack([Layer(strange=i == 4) for i in range(9)]), []),
        (Stack([Layer(strange=i % 3 == 1) for i in range(25)]), [4]),
        (Stack([Layer(strange=i < 2) for i in range(12)]), [5]),
        (Stack([Layer() for _ in range(9)], collect=True), [4]),
        (Stack([Layer() for _ in range(9)], indexed=True), []),
        (Stack([Layer()] * 9), []),
        (shared_stack(), [4]),
        (Stack([Layer(scale=[0.5, 1.0, 2.0, 4.0]) for _ in range(9)]), [4]),
        (Stack([Layer(scale=[0.5, 1.0, 2.0, 4.0 + (i == 4)]) for i in range(9)]), []),
    ],
    ids=[
        "plain",
        "one differs",
        "period 3",
        "head",
        "collected",
        "by index",
        "one module",
        "shared weight",
        "constant",
        "one constant differs",
    ],
)
def test_whatever_is_done_to_layers_the_graph_is_right(
    model: Stack, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, repeats = both(model, (torch.zeros(2, 4),), {}, monkeypatch)
    assert [repeat.copies for repeat in repeats] == copies
    x = torch.randn(2, 4)
    parameters, buffers = parameters_of(captured, model), buffers_of(captured, model)
    loss, _ = run_captured(captured, parameters, buffers, bind_inputs(captured.inputs, (x,), {}))
    torch.testing.assert_close(loss, model(x))


@pytest.mark.parametrize("seed", range(200))
def test_a_repeat_names_copies_that_are_alike(seed: int) -> None:
    """Random sequences: what is left out equals the unit, and nothing is left out where fewer than three would be."""
    rng = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=rng))

    unit = [str(draw(3)) for _ in range(1 + draw(4))]
    traces = [str(draw(3)) for _ in range(draw(4))] + unit * draw(12) + [str(draw(3)) for _ in range(draw(4))]
    repeat = longest_repeat("stack", traces)
    if repeat is None:
        return
    standing = {layer: repeat.position(layer) for layer in range(len(traces))}
    assert all(traces[layer] == traces[repeat.kept[position]] for layer, (position, _) in standing.items())
    assert all(repeat.real(position, copy) == layer for layer, (position, copy) in standing.items())
    assert sum(copy > 0 for _, copy in standing.values()) == repeat.copies * repeat.period >= 3
    before = [traces[repeat.kept[i]] for i in range(repeat.unit - repeat.period, repeat.unit)]
    assert before == [traces[repeat.kept[i]] for i in range(repeat.unit, repeat.unit + repeat.period)]
