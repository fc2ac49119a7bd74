"""What do people call each factor of a program's ops? Looked up once a program, for all numbers of micro-batches."""

from collections.abc import Mapping

from autopar.lower.program import Op, Program
from autopar.rules.words import dim_tags, factor_tags

WORDS_OF = "factor words of"
"""Key of `Program.form`: the program whose graph is at hand, of those that differ in sizes alone."""


def factor_words(program: Program) -> Mapping[str, Mapping[str, str]]:
    """Op -> factor -> its word (`heads`, `batch`, ...), "" where nothing names it."""
    source: Program = program.form.get(WORDS_OF, program)
    if "factor words" not in source.made:
        tags, nodes = dim_tags(source.captured), source.captured.nodes
        source.made["factor words"] = {op.name: factor_tags(nodes[op.name], op.rule, tags) for op in source.ops}
    found: Mapping[str, Mapping[str, str]] = source.made["factor words"]
    return found


def word_of(op: Op, option: str, words: Mapping[str, Mapping[str, str]]) -> str:
    """What people call a choice of an op: its factor's word or name, `whole`, or `summands`."""
    if option in ("replicate", "invariant"):
        return "whole"
    if option not in op.rule.factors:
        return "summands"
    return words.get(op.name, {}).get(option, "") or option
