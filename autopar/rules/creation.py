"""Ops that make a tensor from nothing: the same on every rank."""

from collections.abc import Callable

from torch import fx

from autopar.rules.describe import result_values
from autopar.rules.rule import Rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]


def _created(node: fx.Node) -> Rule:
    """Every rank makes the whole. Random ones agree only if the ranks' default generators do."""
    ranks = tuple(source.meta["val"].dim() for source in operands(node))
    return Rule(
        factors={},
        operands=tuple((None,) * rank for rank in ranks),
        results=tuple((None,) * value.dim() for value in result_values(node)),
    )


NAMES = (
    *("arange.default", "arange.start", "arange.start_step", "linspace.default", "eye.default", "eye.m"),
    *("full.default", "zeros.default", "ones.default", "empty.memory_format", "scalar_tensor.default"),
    *("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"),
)

RULES: dict[str, Maker] = {f"aten.{name}": _created for name in NAMES}
