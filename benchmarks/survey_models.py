"""What did the survey train? The gradients of its two models in the order of backward, with each layer's part of time.

Shapes: ResNet-50, He et al. 2015, Table 1 (stride in the 3x3 convolution, as torchvision has it), images of 224 x 224;
BERT for pre-training, Devlin et al. 2018, sizes as in the row, the vocabulary padded to 30,528, 64 tokens a sentence
(github.com/HKBU-HPML/ddl-benchmarks). The decoder's weight is the word embedding's, so its gradient is complete only at
the end of backward. Time is measured as a whole; a layer's part of it is its roofline time on the GPU of the
repository's profiles (V100-PCIE, data sheet: 14 Tflop/s fp32, 900 GB/s), backward twice the forward.
"""

from dataclasses import dataclass
from functools import cache

from autopar.cost_models.gradient_exchange.model import ExchangeModel, Gradient

PEAK_FLOPS, MEMORY_BANDWIDTH = 14e12, 900e9
Layer = tuple[str, int, float, float]  # name, parameters, flops and bytes moved of its forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert:
    """Sizes of a BERT; `sentences` of `tokens` a device."""

    sentences: int
    tokens: int
    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int


@cache
def model(name: str, sizes: Bert | int, step_seconds: float, update_seconds: float) -> ExchangeModel:
    """The model whose step on one device takes `step_seconds`, and `update_seconds` more when distributed.

    `sizes`: of a BERT, or the images a device of a ResNet-50.
    """
    layers = resnet50(sizes) if isinstance(sizes, int) else bert(sizes)
    weight = [flops / PEAK_FLOPS + moved / MEMORY_BANDWIDTH for _, _, flops, moved in layers]
    unit = step_seconds / sum(weight) / 3
    gradients = [
        Gradient(layer[0], 4.0 * layer[1], 2 * unit * part, unit * part)
        for layer, part in zip(layers, weight, strict=True)
    ]
    return ExchangeModel(name=name, gradients=tuple(reversed(gradients)), update_seconds=update_seconds)


def undivided(model: ExchangeModel) -> ExchangeModel:
    """The model as one layer with one gradient: the same to a system that sends all after backward."""
    forward = model.forward_seconds
    whole = Gradient("all", float(model.nbytes.sum()), float(model.ready[-1]) - forward, forward)
    return ExchangeModel(name=model.name, gradients=(whole,), update_seconds=model.update_seconds)


def resnet50(images: int) -> list[Layer]:
    """Layers in the order of forward."""
    layers: list[Layer] = []

    def convolution(name: str, inputs: int, outputs: int, kernel: int, size: int, after: float = 2.0) -> None:
        """`after` the normalisation: activations read and written by ReLU, the sum with the shortcut, pooling."""
        activations = 4.0 * images * outputs * size * size
        flops = 2.0 * images * inputs * outputs * kernel**2 * size * size
        layers.append((f"{name}.conv", inputs * outputs * kernel**2, flops, 2 * activations))
        # normalisation reads twice and writes once
        layers.append((f"{name}.norm.weight", outputs, 0.0, (3 + after) * activations))
        layers.append((f"{name}.norm.bias", outputs, 0.0, 0.0))

    convolution("stem", 3, 64, 7, 112, after=3.25)
    inputs, size = 64, 56
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            before = size if stage == 0 or block else 2 * size
            name = f"stage{stage}.{block}"
            convolution(f"{name}.1", inputs, width, 1, before)
            convolution(f"{name}.2", width, width, 3, size)
            convolution(f"{name}.3", width, 4 * width, 1, size, after=5.0)
            if not block:
                convolution(f"{name}.shortcut", inputs, 4 * width, 1, size, after=0.0)
            inputs = 4 * width
        size //= 2
    layers.append(("classes.weight", 2048 * 1000, 2.0 * images * 2048 * 1000, 0.0))
    layers.append(("classes.bias", 1000, 0.0, 0.0))
    return layers


def bert(sizes: Bert) -> list[Layer]:
    """Layers in the order of forward."""
    hidden, inner, heads, tokens = sizes.hidden, sizes.inner, sizes.heads, sizes.tokens
    vocabulary, rows = sizes.vocabulary, sizes.sentences * sizes.tokens
    layers: list[Layer] = []

    def linear(name: str, inputs: int, outputs: int, moved: float = 0.0, flops: float = 0.0) -> None:
        layers.append((f"{name}.weight", inputs * outputs, 2.0 * rows * inputs * outputs + flops, moved))
        layers.append((f"{name}.bias", outputs, 0.0, 0.0))

    def normalisation(name: str) -> None:
        """With the dropout and the sum before it: three passes over the activations that read, two that write."""
        layers.append((f"{name}.weight", hidden, 0.0, 7 * 4.0 * rows * hidden))
        layers.append((f"{name}.bias", hidden, 0.0, 0.0))

    layers.append(("words", vocabulary * hidden, 0.0, 8.0 * rows * hidden))
    layers.append(("positions", 512 * hidden, 0.0, 8.0 * rows * hidden))
    layers.append(("types", 2 * hidden, 0.0, 8.0 * rows * hidden))
    normalisation("embedding.norm")
    for block in range(sizes.layers):
        for name in ("query", "key", "value"):
            linear(f"{block}.{name}", hidden, hidden, 4 * 4.0 * rows * hidden)
        scores = 4.0 * rows * tokens * heads
        # scale, mask, softmax, dropout: each reads and writes the scores
        linear(f"{block}.output", hidden, hidden, 9 * scores, 4.0 * rows * tokens * hidden)
        normalisation(f"{block}.norm1")
        linear(f"{block}.inner", hidden, inner, 2 * 4.0 * rows * inner)
        linear(f"{block}.outer", inner, hidden)
        normalisation(f"{block}.norm2")
    linear("pooler", hidden, hidden)
    # the decoder's bias; its flops, and the cross-entropy over the words, are its time
    layers.append(("decoder.bias", vocabulary, 2.0 * rows * vocabulary * hidden, 4 * 4.0 * rows * vocabulary))
    linear("transform", hidden, hidden)
    normalisation("transform.norm")
    layers.append(("next.weight", 2 * hidden, 0.0, 0.0))
    layers.append(("next.bias", 2, 0.0, 0.0))
    # the pooler and the next-sentence head see one token of a sentence
    return [
        (name, size, flops / tokens if name.startswith("pooler") else flops, moved)
        for name, size, flops, moved in layers
    ]
