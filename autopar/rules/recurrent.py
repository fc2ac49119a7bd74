"""Recurrent nets and their cells: `x[batch steps inputs], weights -> y[batch steps hidden], h[layers batch hidden]`.

Rows of a batch are free. Hidden units are not: every step reads those of the step before, all of them, so that ranks
which split them would gather the state at every step, forward and backward, where ranks that split the batch send
nothing. Steps follow each other, and layers are in one call. Where a call is composed of steps, on a CPU, a layer's
inputs are multiplied for all steps before the first (a copy, where the batch is the first dim), and every step saves
the layer's second weight: gathered again it serves all steps (`once`), and is gone before backward reads another.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import fx

from autopar.ops.regather import once
from autopar.rules.describe import argument, numel, result_values, shapes_of
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Call, Dims, Factor, Local, Rule, Shapes, replicated_rule
from autopar.values.graph import operands, requires_grad

Maker = Callable[[fx.Node], Rule]


def _net(node: fx.Node) -> Rule:
    """`lstm(x, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)`, and alike."""
    sources = operands(node)
    shapes = shapes_of(sources)
    drops = argument(node, 5, "dropout", 0.0) > 0 and argument(node, 6, "train", False)
    if drops or len(shapes[0]) != 3:
        return replicated_rule(tuple(map(len, shapes)), tuple(v.dim() for v in result_values(node)))
    first = bool(argument(node, 8, "batch_first", False))
    num_states = 2 if str(node.target).startswith("aten.lstm") else 1
    row: Dims = ("batch", None, None) if first else (None, "batch", None)
    state: Dims = (None, "batch", None)
    steps = shapes[0][1 if first else 0]
    rule = _rule(node, (row, *(state,) * num_states), (row, *(state,) * num_states), steps)
    if not first or not rule.saves:
        return rule
    copied = numel(shapes[0]) * sources[0].meta["val"].element_size() * (2 if argument(node, 7, "bidirectional") else 1)
    return replace(rule, saves=tuple(i for i in rule.saves if i), saves_nbytes=rule.saves_nbytes + copied)


def _cell(node: fx.Node) -> Rule:
    """`cell(x, states, weights)` of one step."""
    num_states = 2 if str(node.target).startswith("aten.lstm") else 1
    row: Dims = ("batch", None)
    return _rule(node, (row,) * (1 + num_states), (row,) * num_states, 1)


def _rule(node: fx.Node, rows: tuple[Dims, ...], results: tuple[Dims, ...], steps: int) -> Rule:
    """rows: dims of the operands that are not weights."""
    sources = operands(node)
    shapes = shapes_of(sources)
    batch = shapes[0][rows[0].index("batch")]
    weights = shapes[len(rows) :]
    flops = 2.0 * steps * batch * sum(numel(w) for w in weights if len(w) == 2)
    saves, saves_results, nbytes = kept_by_autograd(node)
    return Rule(
        factors={"batch": Factor(size=batch)} if batch > 1 else {},
        operands=tuple(_named(dims, batch) for dims in (*rows, *((None,) * len(w) for w in weights))),
        results=tuple(_named(dims, batch) for dims in results),
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        flops=flops,
        backward_flops=2 * flops if node.meta["requires_grad"] else 0.0,
        localize=_localize if steps > 1 else None,
        spare=partial(_spare, len(rows), requires_grad(sources[0])) if steps > 1 else None,
        in_turn=frozenset(i for i in saves if i > len(rows)) if steps > 1 else frozenset(),
    )


def _spare(first: int, has_gradient: bool, operands: Shapes, _: Shapes) -> tuple[int, int]:
    """Forward the gates of all steps, made of the inputs; backward makes the gradient of those when gates are gone.

    first: number of the first weight. has_gradient: whether the inputs have one.
    """
    gates = numel(operands[0][:-1]) * operands[first][0]
    return gates, -min(numel(operands[0]), gates) if has_gradient else 0


def _localize(local: Local) -> Call:
    return once, (local.node.target, *local.node.args), dict(local.node.kwargs)


def _named(dims: Dims, batch: int) -> Dims:
    return dims if batch > 1 else (None,) * len(dims)


RULES: dict[str, Maker] = {
    **{f"aten.{name}.input": _net for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}.default": _cell for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")},
}
