"""A sharding rule in one line: `x[b.. i], w[o i], +bias[o] -> y[b.. o]`.

A name in brackets is the factor that a dim runs over; one that is missing from the results is summed. `_` is a dim that
is whole on every rank, `b..` any number of dims, a factor each. `+` marks an operand that is added to the results, once
where they are summands.
"""

import re
from dataclasses import dataclass

from autopar.errors import RuleError

_TENSOR = re.compile(r"(\+?)\s*(\w+)\s*\[([^\[\]]*)\]")
_FACTOR = re.compile(r"[A-Za-z]\w*(\.\.)?|_")
RESERVED = re.compile(r"replicate|invariant|partial\d*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A tensor of the notation: its name, the factor of each dim (`b..` for any number), and whether it is added."""

    name: str
    factors: tuple[str, ...]
    added: bool

    def takes(self, rank: int) -> bool:
        """Whether a tensor of so many dims may be it."""
        spread = any(f.endswith("..") for f in self.factors)
        return rank >= len(self.factors) - 1 if spread else rank == len(self.factors)

    def dims(self, rank: int) -> tuple[str, ...]:
        """The factor of each dim of a tensor of so many, `_` for none; dims of `b..` are numbered from the right."""
        out: list[str] = []
        for factor in self.factors:
            if factor.endswith(".."):
                count = rank - len(self.factors) + 1
                out += [f"{factor[:-2]}{n}" for n in reversed(range(count))]
            else:
                out.append(factor)
        return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A rule as it was written, and its tensors."""

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]

    def takes(self, operands: tuple[int, ...], results: tuple[int, ...]) -> bool:
        """Whether a call of tensors of so many dims may be meant."""
        terms, ranks = (*self.operands, *self.results), (*operands, *results)
        return len(self.operands) == len(operands) and len(terms) == len(ranks) and all(map(Term.takes, terms, ranks))


def parse(text: str) -> Notation:
    """The rule that a line says.

    Raises:
        RuleError: if it says none.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no result; write operands -> results, as in 'x[b i], w[o i] -> y[b o]'")
    operands, results = _terms(left, text), _terms(right, text)
    if not operands or not results:
        raise RuleError(f"rule {text!r} has no {'results' if operands else 'operands'}; name each tensor, as in x[b i]")
    if added := [term.name for term in results if term.added]:
        raise RuleError(f"rule {text!r} marks its result {added[0]} as added; + is for operands")
    known = {factor for term in operands for factor in term.factors}
    if new := sorted({factor for term in results for factor in term.factors} - known - {"_"}):
        raise RuleError(f"rule {text!r} has {new[0]} in a result, but in no operand; use _ for a dim that is not split")
    return Notation(text=text, operands=operands, results=results)


def _terms(side: str, text: str) -> tuple[Term, ...]:
    terms: list[Term] = []
    rest = side.strip()
    while rest:
        found = _TENSOR.match(rest)
        if found is None:
            raise RuleError(f"rule {text!r} cannot be read at {rest!r}; write tensors as name[factors], with commas")
        plus, name, inside = found.groups()
        factors = tuple(inside.split())
        for factor in factors:
            if not _FACTOR.fullmatch(factor) or RESERVED.fullmatch(factor):
                raise RuleError(f"rule {text!r} has {factor!r} in {name}; a factor is a word, `word..` or _")
            if factor != "_" and factors.count(factor) > 1:
                raise RuleError(f"rule {text!r} has {factor} twice in {name}; a split takes one dim of a tensor, use _")
        if sum(factor.endswith("..") for factor in factors) > 1:
            raise RuleError(f"rule {text!r} has two of `..` in {name}; one says which dims it takes")
        terms.append(Term(name=name, factors=factors, added=bool(plus)))
        rest = rest[found.end() :].strip()
        if rest and not rest.startswith(","):
            raise RuleError(f"rule {text!r} cannot be read at {rest!r}; put a comma between tensors")
        rest = rest[1:].strip()
    return tuple(terms)
