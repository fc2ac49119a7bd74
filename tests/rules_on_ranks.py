"""A rule's choices on the ranks of a simulated mesh: a call run on shards, put together, against the call run whole."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.rules.describe import result_values
from autopar.rules.registry import rule_of
from autopar.rules.rule import Choice, Rule, layouts, localized
from autopar.values.graph import operands
from autopar.values.mesh import Mesh
from tests.law import GRADIENT_SUMMANDS, VALUE_SUMMANDS, cut, join
from tests.op_sample import Sample, as_results

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""Of results that are not in float64."""
DRAWS = Draws(seed=1, step=2, exact=True)
RunRanks = Callable[[Mesh, Callable[[int], tuple[list[Tensor], list[Tensor]]]], list]


def sends(node: fx.Node, rule: Rule, chosen: tuple[Choice, ...], mesh: Mesh) -> bool:
    return rule.messages is not None and rule.messages(local_of(node, chosen, mesh)) != ((), ())


def local_of(node: fx.Node, chosen: tuple[Choice, ...], mesh: Mesh):
    sources, results = operands(node), result_values(node)
    given, made = layouts(chosen, grads_of_operands(node), tuple(r.dtype.is_floating_point for r in results))
    shapes = tuple(tuple(s.meta["val"].shape) for s in sources)
    return localized(node, chosen, mesh, given, made, shapes, tuple(tuple(r.shape) for r in results))


def grads_of_operands(node: fx.Node) -> tuple[bool, ...]:
    return tuple(s.meta["requires_grad"] for s in operands(node))


def sampled_call(sample: Sample) -> tuple[fx.Node, list[Tensor]]:
    """Its node, and the operands in their order there."""
    node, tensors = sample.node(), sample.tensors(seed=3)
    return node, [tensors[int(s.name.removeprefix("x"))] for s in operands(node)]


def check_node(
    node: fx.Node, wholes: list[Tensor], mesh: Mesh, chosen: tuple[Choice, ...], run_ranks: RunRanks
) -> None:
    """Run a call on the whole operands, and on every rank of `mesh`; compare results and gradients."""
    rule = rule_of(node)
    local = local_of(node, chosen, mesh)
    generator = torch.Generator().manual_seed(7)
    grads = grads_of_operands(node)

    # the same input given twice is two operands, each with a gradient of its own
    leaves = [x.clone().requires_grad_(g) for x, g in zip(wholes, grads, strict=True)]
    with use_draws(DRAWS):
        expected = evaluate(node.target, node.args, dict(node.kwargs), leaves)
    incoming = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) if r.requires_grad else None
        for r in expected
    ]
    backward(expected, incoming)

    parts = [
        cut(x, layout, mesh, VALUE_SUMMANDS, generator, garbage=True)
        for x, layout in zip(wholes, local.operands, strict=True)
    ]
    incoming_parts = [
        None if g is None else cut(g, layout, mesh, GRADIENT_SUMMANDS, generator, garbage=False)
        for g, layout in zip(incoming, local.results, strict=True)
    ]
    target, args, kwargs = rule.localize(local) if rule.localize else (node.target, node.args, dict(node.kwargs))

    def one_rank(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        mine = [p[rank].clone().requires_grad_(g) for p, g in zip(parts, grads, strict=True)]
        for tensor, shape in zip(mine, local.operand_shapes, strict=True):
            assert tuple(tensor.shape) == shape
        with use_draws(DRAWS):
            results = evaluate(target, args, kwargs, mine)
        for tensor, shape in zip(results, local.result_shapes, strict=True):
            assert tuple(tensor.shape) == shape
        backward(results, [None if p is None else p[rank] for p in incoming_parts])
        return [r.detach() for r in results], [gradient(t) for t in mine]

    outcomes = run_ranks(mesh, one_rank)
    tolerance = max((TOLERANCES.get(t.dtype, 1e-10) for t in (*expected, *wholes)), default=1e-10)
    for i, whole in enumerate(expected):
        got = join([o[0][i] for o in outcomes], tuple(whole.shape), local.results[i], mesh, VALUE_SUMMANDS, tolerance)
        torch.testing.assert_close(
            got, whole.detach(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, i=i: f"result {i}: {m}"
        )
    for i, leaf in enumerate(leaves):
        if grads[i]:
            got = join(
                [o[1][i] for o in outcomes], tuple(leaf.shape), local.operands[i], mesh, GRADIENT_SUMMANDS, tolerance
            )
            torch.testing.assert_close(
                got,
                gradient(leaf),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda m, i=i: f"gradient of operand {i}: {m}",
            )


def evaluate(target, args, kwargs, values: list[Tensor]) -> list[Tensor]:
    """The call with its tensor operands, in operand order, replaced by `values`."""
    given = iter(values)
    args, kwargs = fx.node.map_arg((args, kwargs), lambda _: next(given))
    return list(as_results(target(*args, **kwargs)))


def backward(results: list[Tensor], incoming: list[Tensor | None]) -> None:
    pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if g is not None and r.requires_grad]
    if pairs:
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])


def gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def one_after_the_other(mesh: Mesh, one_rank) -> list:
    out = []
    for rank in range(mesh.size):
        with use_groups(Groups(mesh=mesh, rank=rank, groups={})):
            out.append(one_rank(rank))
    return out
