"""Einsum: its equation is its rule. A letter is a factor, one that is not in the result is summed.

A letter twice in one operand (a diagonal) is whole; dims of an ellipsis are letters of their own, aligned at the right.
"""

from collections.abc import Callable

from torch import fx

from autopar.rules.describe import all_float, dim_name, grads_of, numel, shapes_of
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Dims, Factor, Product, Rule, Shapes
from autopar.values.graph import operands


def letters(equation: str, shapes: Shapes) -> tuple[tuple[str, ...], ...]:
    """The letter of each dim of each operand, and of the result as the last entry."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = [_spread(term, len(shape)) for term, shape in zip(left.split(","), shapes, strict=True)]
    if arrow:
        widest = max((len([c for c in term if c.startswith("...")]) for term in terms), default=0)
        result = _spread(right, len(right.replace("...", "")) + widest)
    else:
        every = [c for term in terms for c in term]
        free = sorted({c for c in every if c.startswith("...")}, key=lambda c: -int(c[3:]))
        result = (*free, *sorted({c for c in every if every.count(c) == 1 and not c.startswith("...")}))
    return (*terms, result)


def _spread(term: str, rank: int) -> tuple[str, ...]:
    """Letters of one operand: dims of the ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    count = rank - len(before) - len(after) if dots else 0
    return (*before, *(f"...{n}" for n in reversed(range(count))), *after)


def _einsum(node: fx.Node) -> Rule:
    sources = operands(node)
    shapes, equation = shapes_of(sources), str(node.args[0])
    terms = letters(equation, shapes)
    result = terms[-1]
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    whole = {c for term in terms for c in term if term.count(c) > 1 or sizes[c] == 1}
    names = {c: dim_name(n) for n, c in enumerate(sizes) if c not in whole}

    def dims(term: tuple[str, ...], shape: tuple[int, ...]) -> Dims:
        return tuple(names[c] if c in names and n == sizes[c] else None for c, n in zip(term, shape, strict=True))

    is_summable = all_float(node, sources)
    summed = {c for c in names if c not in result}
    if not is_summable:
        names = {c: name for c, name in names.items() if c not in summed}
    flops = 2.0 * numel(tuple(sizes.values())) * max(1, len(sources) - 1)
    saves, saves_results, nbytes = kept_by_autograd(node)
    is_alone = len(set(sources)) == len(sources)
    return Rule(
        factors={name: Factor(size=sizes[c], summed=c in summed, even=c in summed) for c, name in names.items()},
        operands=tuple(map(dims, terms, shapes)),
        results=(dims(result, tuple(node.meta["val"].shape)),),
        linear=tuple(frozenset({i}) for i in range(len(sources))) if is_summable and is_alone else (),
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        flops=flops,
        backward_flops=flops * sum(grads_of(sources)),
        product=Product(left=0, right=1, sizes=_sizes_of(equation)) if len(sources) == 2 else None,
    )


def _sizes_of(equation: str) -> Callable[[Shapes, Shapes], tuple[int, int, int, int]]:
    def sizes(operand_shapes: Shapes, _: Shapes) -> tuple[int, int, int, int]:
        left, right, result = letters(equation, operand_shapes)
        size = dict(zip((*left, *right), (*operand_shapes[0], *operand_shapes[1]), strict=True))

        def product(chosen: set[str]) -> int:
            return numel(tuple(size[c] for c in chosen))

        both = set(left) & set(right)
        only = set(left) - both, set(right) - both
        return product(both & set(result)), product(only[0]), product(only[1]), product(both - set(result))

    return sizes


RULES: dict[str, Callable[[fx.Node], Rule]] = {"aten.einsum.default": _einsum}
