"""Which parameters, ops and inputs does a pattern match? By their dotted names, or those of modules around them."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from autopar.errors import PinError
from autopar.lower.program import Program
from autopar.values.pins import KINDS

RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")
MOST = 10_000
"""Numbers of the longest range."""
SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """Names of what a pattern matches. outputs: ops whose results the matched ops and modules hand on."""

    parameters: tuple[str, ...]
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def matcher(
    text: str,
    program: Program,
    parameters: Mapping[str, tuple[str, ...]],
    inputs: Mapping[str, tuple[str, ...]],
    said: str,
) -> Matcher:
    """What a pattern matches in a program.

    parameters, inputs: what users call each placeholder.
    said: what the pattern is of, for messages.

    Raises:
        PinError: if it matches nothing.
    """
    kind, colon, pattern = text.partition(":")
    kind, pattern = (kind, pattern.strip()) if colon and kind in KINDS else ("", text)
    fits = _fitting(pattern, said)
    held = [
        tuple(name for name, called in table.items() if any(any(map(fits, _around(one))) for one in called))
        for table in (parameters, inputs)
    ]
    ops, outputs = [], []
    for op in program.ops:
        dotted = f"{op.module}.{op.name}" if op.module else op.name
        modules = [module for module in _around(op.module) if fits(module)] if op.module else []
        is_own = fits(op.name) or fits(dotted)
        if not is_own and not modules:
            continue
        ops.append(op.name)
        if is_own or any(_leaves(program, op.position, module) for module in modules):
            outputs.append(op.name)
    found = Matcher(
        parameters=held[0] if kind in ("", "parameter") else (),
        ops=tuple(ops) if kind in ("", "op", "output") else (),
        inputs=held[1] if kind in ("", "input") else (),
        outputs=tuple(outputs) if kind in ("", "op", "output") else (),
    )
    if not (found.parameters or found.ops or found.inputs):
        known = [_kind(name) for name in _names(program, parameters, inputs, kind)]
        what = kind or "parameter, module, call or input"
        listed = ", ".join(_nearest(pattern, dict.fromkeys(known)))
        raise PinError(f"{said}: {pattern!r} matches no {what} of {program.captured.name}; near are {listed}")
    return found


def _names(
    program: Program, parameters: Mapping[str, tuple[str, ...]], inputs: Mapping[str, tuple[str, ...]], kind: str
) -> Iterator[str]:
    if kind in ("", "op", "output"):
        yield from (module for op in program.ops for module in _around(op.module))
    if kind in ("", "parameter"):
        yield from (name for called in parameters.values() for name in called)
    if kind in ("", "input"):
        yield from (name for called in inputs.values() for name in called)


def _kind(name: str) -> str:
    """With its numbers left out, as one of many layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _nearest(pattern: str, known: Iterable[str]) -> list[str]:
    """Names with the parts most like one of the pattern's, those of few parts first."""
    asked = [part for part in re.split(r"[.*?\[\]]+", pattern) if part] or [pattern]

    @cache
    def likeness(part: str) -> float:
        return max(SequenceMatcher(a=one, b=part).ratio() for one in asked)

    def rank(name: str) -> tuple[float, int]:
        parts = name.split(".")
        return -max(map(likeness, parts)), len(parts)

    return sorted(known, key=rank)[:SHOWN]


@cache
def _around(name: str) -> tuple[str, ...]:
    """A dotted name and those of all modules that it is in: `a.b.c`, `a.b`, `a`."""
    parts = name.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1)) if name else ()


def _fitting(pattern: str, said: str) -> Callable[[str], bool]:
    expression = r"\.".join(_part(part, said) for part in pattern.split("."))
    matches = re.compile(expression, re.DOTALL).fullmatch
    known: dict[str, bool] = {}

    def fits(name: str) -> bool:
        if name not in known:
            known[name] = matches(name) is not None
        return known[name]

    return fits


def _part(part: str, said: str) -> str:
    if (found := RANGE.fullmatch(part)) is None:
        return fnmatch.translate(part).removeprefix("(?s:").rpartition(")")[0]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + MOST:
        raise PinError(f"{said}: {part} is no range of up to {MOST} numbers; write the smaller one first, as in 0-3")
    return f"(?:{'|'.join(map(str, range(first, last + 1)))})"


def _leaves(program: Program, position: int, module: str) -> bool:
    """Whether an op's result is read outside of a module that it is in, or is the loss."""
    results = [name for name in program.ops[position].results if name is not None]
    if {program.loss, *program.mutated} & set(results):
        return True
    readers = (program.ops[reader].module for name in results for reader, _ in program.readers[name])
    return any(reader != module and not reader.startswith(module + ".") for reader in readers)
