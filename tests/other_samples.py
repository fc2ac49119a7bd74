"""Sample calls of sums into places, experts, bags, recurrent nets and transposed convolutions."""

from typing import Any

from autopar.ops.bags import bags
from tests.expert_samples import EXPERTS
from tests.op_sample import Input, Sample, X, aten


def _floats(*shapes: tuple[int, ...]) -> tuple[Input, ...]:
    return tuple(Input(shape=s) for s in shapes)


def _ids(shape: tuple[int, ...], high: int, low: int = 0) -> Input:
    return Input(shape=shape, kind="ids", high=high, low=low)


def _into(
    name: str, x: tuple[int, ...], index: tuple[int, ...], source: tuple[int, ...], *rest: object, grad: bool = True
) -> Sample:
    """A call on places along dim 1 of x."""
    target = getattr(aten, name)
    target = target.two if "reduce" in name else target.default
    title = " ".join([name, *map(str, rest), *("x".join(map(str, s)) for s in (x, index, source))])
    inputs = (Input(shape=x), _ids(index, x[1]), Input(shape=source, grad=grad))
    return Sample(name=title, target=target, args=(X(0), 1, X(1), X(2), *rest), inputs=inputs)


SUMS = (
    _into("index_add", (4, 5, 6), (12,), (4, 12, 6)),
    _into("scatter_add", (4, 5, 6), (4, 12, 6), (4, 12, 6)),
    _into("scatter_add", (4, 5, 6), (4, 6, 4), (4, 12, 6), grad=False),
    *(_into("scatter_reduce", (4, 5, 6), (4, 12, 6), (4, 12, 6), how) for how in ("prod", "amax")),
    *(
        Sample(
            name=f"index_put, {title}",
            target=aten.index_put.default,
            args=(X(0), indices, X(values), accumulate),
            inputs=inputs,
        )
        for title, indices, values, accumulate, inputs in (
            ("rows added", [X(1)], 2, True, (*_floats((5, 6)), _ids((12,), 5), *_floats((12, 6)))),
            ("rows written", [X(1)], 2, False, (*_floats((5, 6)), _ids((1,), 5), *_floats((1, 6)))),
            (
                "two in the middle",
                [None, X(1), X(2)],
                3,
                True,
                (*_floats((4, 5, 3, 6)), _ids((6, 1), 5), _ids((4,), 3), *_floats((4, 6, 4, 1))),
            ),
        )
    ),
)


def _bags(
    title: str, ids: tuple[int, ...], mode: str, *, offsets: int = 0, weights: bool = False, pad: int = -1
) -> Sample:
    """Bags of a table of 12 rows; `offsets`: so many bags begin anywhere in a row of ids."""
    inputs = [*_floats((12, 6)), _ids(ids, 12)]
    if offsets:
        inputs.append(Input(shape=(offsets,), kind="starts", high=ids[0]))
    if weights:
        inputs.append(Input(shape=ids))
    args = (X(0), X(1), X(2) if offsets else None, X(len(inputs) - 1) if weights else None)
    kwargs = {"mode": mode, "padding_idx": pad}
    return Sample(name=f"bags {title} {mode}", target=bags, args=args, inputs=tuple(inputs), kwargs=kwargs)


BAGS = (
    *(_bags("of rows", (4, 6), mode) for mode in ("sum", "mean", "max")),
    *(_bags("padded", (4, 6), mode, pad=7) for mode in ("sum", "mean", "max")),
    _bags("weighted", (4, 6), "sum", weights=True, pad=3),
    _bags("of two dims", (4, 3, 2), "sum"),
    *(_bags("by offsets", (12,), mode, offsets=4) for mode in ("sum", "mean", "max")),
    _bags("by offsets, weighted", (12,), "sum", offsets=4, weights=True, pad=5),
)


def _loss(name: str, *args: object, shapes: tuple[tuple[int, ...], ...]) -> Sample:
    """A loss of each element, of which only the first operand has a gradient."""
    inputs = tuple(Input(shape=s, kind="positive" if i else "float", grad=not i) for i, s in enumerate(shapes))
    return Sample(name=name, target=getattr(aten, name).default, args=args, inputs=inputs)


PAIR = ((4, 6), (4, 6))
LOSSES = (
    _loss("binary_cross_entropy_with_logits", X(0), X(1), None, X(2), 0, shapes=(*PAIR, (6,))),
    _loss("kl_div", X(0), X(1), 0, shapes=PAIR),
    _loss("poisson_nll_loss", X(0), X(1), True, False, 1e-8, 0, shapes=PAIR),
    _loss("hinge_embedding_loss", X(0), X(1), 1.0, 0, shapes=PAIR),
    _loss("margin_ranking_loss", X(0), X(1), X(2), 0.0, 0, shapes=(*PAIR, (6,))),
)


def _net(name: str, batch: int, hidden: int, gates: int, *, states: int = 1, first: bool = False) -> Sample:
    """Two layers of a recurrent net over rows of three steps and five inputs."""
    x = (batch, 3, 5) if first else (3, batch, 5)
    layer = [(gates * hidden, 5), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]
    layers = [*layer, (gates * hidden, hidden), *layer[1:]]
    inputs = _floats(x, *[(2, batch, hidden)] * states, *layers)
    own: Any = [X(1), X(2)] if states == 2 else X(1)
    args = (X(0), own, [X(1 + states + i) for i in range(8)], True, 2, 0.0, True, False, first)
    return Sample(name=f"{name} {x}", target=getattr(aten, name).input, args=args, inputs=inputs)


def _cell(name: str, gates: int, *, states: int = 1) -> Sample:
    inputs = _floats((4, 5), *[(4, 6)] * states, (gates * 6, 5), (gates * 6, 6), (gates * 6,), (gates * 6,))
    own: Any = [X(1), X(2)] if states == 2 else X(1)
    args = (X(0), own, *(X(1 + states + i) for i in range(4)))
    return Sample(name=name, target=getattr(aten, name).default, args=args, inputs=inputs)


RECURRENT = (
    _net("lstm", 4, 6, 4, states=2),
    _net("lstm", 6, 4, 4, states=2, first=True),
    _net("gru", 4, 6, 3, first=True),
    _net("rnn_tanh", 6, 4, 1),
    _cell("lstm_cell", 4, states=2),
    _cell("gru_cell", 3),
    _cell("rnn_relu_cell", 1),
)
JOINED = (
    Sample(name="cat of two", target=aten.cat.default, args=([X(0), X(1)], 1), inputs=_floats((4, 6), (4, 10))),
    Sample(name="cat of rows", target=aten.cat.default, args=([X(0), X(1)], 0), inputs=_floats((4, 6), (8, 6))),
)
OTHERS = (*JOINED, *BAGS, *LOSSES, *RECURRENT, *EXPERTS, *SUMS)
