"""What must a plan respect? A person's decisions, as a value: patterns of names, and what is decided of each.

A *pin* is one line: `*.attn.*: model=heads`. Its pattern (`fnmatch`; a part `0-3` is a range of numbers) is of dotted
names of parameters, modules, calls or inputs, and matches what lies in a module that it matches. What it says, of each
`on` one of several words:

    a mesh axis, or `*` for each    a factor word (`heads`, `batch`, ...) or `whole`: how calls are split there
                                    a placement (`shard(0)`, `replicate`, ...): how a parameter or input is stored
                                    there, or what is made there
    lifetime                        how long a gathered copy of a parameter lives: always, step, microbatch or use
    recompute                       true or false: whether calls are run again in backward

Pins of several lines hold together. `forbid` and `demand` name techniques.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from autopar.errors import PinError
from autopar.values.choices import near
from autopar.values.lifetimes import LIFETIMES
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Shard
from autopar.values.schema import Word, checked, of_file

EVERY = "*"
LIFETIME, RECOMPUTE = "lifetime", "recompute"
WHOLE = "whole"
KINDS = ("parameter", "op", "input", "output")
"""What a pattern may be of alone: `input:input_ids`. An output is what a module or a call hands on."""
FORBID, DEMAND = "forbid", "demand"
PIPELINE = "pipeline"
TECHNIQUES = (
    "data parallel",
    "sequence parallel",
    "tensor parallel",
    "vocabulary parallel",
    "expert parallel",
    "fsdp",
    "recompute",
    PIPELINE,
)
MAX_LINES = 1000

_PLACEMENT = re.compile(r"(?:shard\((\d{1,2})\)|S(\d{1,2}))")
_WHOLE: Mapping[str, Placement] = {
    **dict.fromkeys(("replicate", "R"), REPLICATE),
    **dict.fromkeys(("invariant", "I"), INVARIANT),
    **dict.fromkeys(("partial", "P"), PARTIAL),
}
"""How texts of placements are read; one letter as plans write them."""


def placement_of(word: str) -> Placement | None:
    """The placement that a word names, None for any other word."""
    if found := _PLACEMENT.fullmatch(word):
        return Shard(int(found[1] or found[2]))
    return _WHOLE.get(word)


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Saying:
    """One of `words` is to hold on `on`: the name of a mesh axis, `*` for each of them, `lifetime` or `recompute`."""

    on: Word
    words: Annotated[tuple[Word, ...], Field(min_length=1, max_length=64)]

    def __str__(self) -> str:
        words = "|".join(self.words)
        return words if self.on == EVERY else f"{self.on}={words}"


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What is decided of all that the pattern `of` matches."""

    of: Word
    says: Annotated[tuple[Saying, ...], Field(min_length=1, max_length=64)]

    def __str__(self) -> str:
        return f"{self.of}: {', '.join(map(str, self.says))}"


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """All lines, and the techniques that are forbidden or demanded."""

    lines: Annotated[tuple[Pin, ...], Field(max_length=MAX_LINES)] = ()
    forbid: Annotated[tuple[Word, ...], Field(max_length=len(TECHNIQUES))] = ()
    demand: Annotated[tuple[Word, ...], Field(max_length=len(TECHNIQUES))] = ()

    def __post_init__(self) -> None:
        """Raises PinError for an unknown technique, or one that is forbidden and demanded."""
        for name in (*self.forbid, *self.demand):
            if name not in TECHNIQUES:
                raise PinError(f"unknown technique {name!r}; choose of {', '.join(TECHNIQUES)}{near(name, TECHNIQUES)}")
        if both := sorted(set(self.forbid) & set(self.demand)):
            raise PinError(f"{both[0]} is both forbidden and demanded; leave one out")

    def __bool__(self) -> bool:
        return bool(self.lines or self.forbid or self.demand)

    @property
    def texts(self) -> tuple[str, ...]:
        """Every pin in words, in their order: lines, what is forbidden, what is demanded."""
        techniques = ((FORBID, name) for name in self.forbid), ((DEMAND, name) for name in self.demand)
        return (*map(str, self.lines), *(f"{how}: {name}" for group in techniques for how, name in group))

    @property
    def axes(self) -> frozenset[str]:
        """Names of mesh axes that lines speak of."""
        spoken = {saying.on for line in self.lines for saying in line.says}
        return frozenset(spoken - {EVERY, LIFETIME, RECOMPUTE})


NO_PINS = Pins()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftedPins(Pins):
    """The same, some of which do not hold, by their numbers in `texts`: a plan is searched in the space of all pins,
    blocks told apart by all, so that what the others cost can be said. They are in no file."""

    lifted: tuple[int, ...] = ()


def pins_of(given: Pins | Mapping[str, Any] | None) -> Pins:
    """`{"*.attn.*": {"model": "heads"}, "*embed*": "replicate", "forbid": ["recompute"]}` as a value.

    Raises:
        PinError: for what is none, with what was expected.
    """
    if given is None:
        return NO_PINS
    if isinstance(given, Pins):
        return given
    if not isinstance(given, Mapping):
        raise PinError(f"pins are a mapping of patterns to what they decide, not {type(given).__name__}; {EXAMPLE}")
    rest = {pattern: said for pattern, said in given.items() if pattern not in (FORBID, DEMAND)}
    made = Pins(
        lines=tuple(_line(pattern, said) for pattern, said in rest.items()),
        forbid=_techniques(FORBID, given.get(FORBID, ())),
        demand=_techniques(DEMAND, given.get(DEMAND, ())),
    )
    return checked(Pins, asdict(made), "pins", PinError, EXAMPLE)  # a plan's file records them


EXAMPLE = 'write {"*.attn.*": {"model": "heads"}}'


def parse_pin(text: str) -> Pins:
    """One pin of the command line: `*.attn.*: model=heads`, `*embed*: replicate`, `forbid: recompute, fsdp`.

    Raises:
        PinError: if it is no such line.
    """
    pattern, colon, said = (part.strip() for part in text.rpartition(":"))
    if not colon or not pattern or not said:
        raise PinError(f"--pin {text!r:.80} is not of the form PATTERN: AXIS=WORD, as in '*.attn.*: model=heads'")
    parts = [part.strip() for part in said.split(",")]
    if pattern in (FORBID, DEMAND):
        return pins_of({pattern: parts})
    table: dict[str, Any] = {}
    for part in parts:
        on, equals, word = (piece.strip() for piece in part.rpartition("="))
        key = on if equals else EVERY
        if key in table:
            raise PinError(f"--pin {text!r:.80} says two things of {key}; write one, or a|b for either")
        table[key] = [one.strip() for one in word.split("|")]
    return pins_of({pattern: table})


def joined(several: Iterable[Pins]) -> Pins:
    """All of them together."""
    parts = list(several)
    return Pins(
        lines=tuple(line for one in parts for line in one.lines),
        forbid=tuple(dict.fromkeys(name for one in parts for name in one.forbid)),
        demand=tuple(dict.fromkeys(name for one in parts for name in one.demand)),
    )


def _line(pattern: Any, said: Any) -> Pin:
    if not isinstance(pattern, str) or not pattern.strip():
        raise PinError(f"a pin's pattern is text, not {pattern!r:.60}; {EXAMPLE}")
    table = said if isinstance(said, Mapping) else {EVERY: said}
    if not table:
        raise PinError(f"pin {pattern!r} says nothing; {EXAMPLE}")
    says = []
    for on, words in table.items():
        if not isinstance(on, str):
            raise PinError(f"pin {pattern!r} speaks of {on!r:.60}; give a mesh axis, {LIFETIME} or {RECOMPUTE}")
        found = _words(pattern, words)
        if on == EVERY and set(found) <= set(LIFETIMES):
            on = LIFETIME
        if on == LIFETIME and (wrong := [word for word in found if word not in LIFETIMES]):
            raise PinError(
                f"pin {pattern!r}: unknown lifetime {wrong[0]!r}; choose of {', '.join(LIFETIMES)}"
                f"{near(wrong[0], LIFETIMES)}"
            )
        if on == RECOMPUTE and found not in (("true",), ("false",)):
            raise PinError(f"pin {pattern!r}: recompute is true or false, not {'|'.join(found)}")
        if on == EVERY and found in (("true",), ("false",)):
            raise PinError(f"pin {pattern!r} says {found[0]} and not of what; write {RECOMPUTE}={found[0]}")
        says.append(Saying(on=on, words=found))
    return Pin(of=pattern, says=tuple(says))


def _words(pattern: str, said: Any) -> tuple[str, ...]:
    if isinstance(said, bool):
        return (str(said).lower(),)
    if isinstance(said, str) and said.strip():
        return (said.strip(),)
    if isinstance(said, list | tuple) and said and all(isinstance(word, str) and word.strip() for word in said):
        return tuple(word.strip() for word in said)
    raise PinError(f"pin {pattern!r} says {said!r:.60}; give a word, a list of words, or a mapping of axes to words")


def _techniques(how: str, said: Any) -> tuple[str, ...]:
    names = (said,) if isinstance(said, str) else said
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PinError(f"{how} {said!r:.60}: give a list of techniques, of {', '.join(TECHNIQUES)}")
    return tuple(dict.fromkeys(names))
