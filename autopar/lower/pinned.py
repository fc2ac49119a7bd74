"""What do pins say of each op, parameter and input of a program? Patterns become names, words become choices.

A factor word holds for every matched op that offers it: `heads` on an attention module is of the ops that have heads.
A placement is of the parameters that a pattern matches, else of inputs, else of what the matched ops and modules hand
on. What matches nothing, or is offered by nothing that it matches, is an error that names what is near.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import PinError
from autopar.lower.factor_words import factor_words, word_of
from autopar.lower.matching import Matcher, matcher
from autopar.lower.program import Op, Program, Tensor
from autopar.values.choices import near
from autopar.values.mesh import Mesh
from autopar.values.pins import (
    EVERY,
    LIFETIME,
    RECOMPUTE,
    WHOLE,
    LiftedPins,
    Pins,
    Saying,
    placement_of,
)
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Shard
from autopar.values.stage_plan import StagePlan

SUMMANDS = "summands"
ALWAYS_OFFERED = (WHOLE, SUMMANDS)

FACTORS_OF: Mapping[str, tuple[str, ...]] = {
    "data parallel": ("batch",),
    "sequence parallel": ("sequence",),
    "tensor parallel": ("columns", "rows", "heads", "vocabulary"),
    "vocabulary parallel": ("vocabulary",),
    "expert parallel": ("experts",),
}
"""Techniques that are factors, which an op may be split by."""

Word = str | Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Of one line, by its number in `Pins.texts`: on a mesh axis, or each (`*`), one of these choices or placements."""

    line: int
    on: str
    allowed: frozenset[Word]

    def holds_on(self, axis: str) -> bool:
        """Whether it speaks of a mesh axis."""
        return self.on in (EVERY, axis)


Decisions = dict[str, tuple[Allowance, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PinnedProgram:
    """Decisions by name: `choices` of ops; `storage` of parameters, `handed` of inputs: placements; `lifetimes`.

    somewhere: of ops, choices of which one is to be made on some axis; sharded: parameters to be split on some axis.
    again, keeps: ops that are run again in backward, and never.
    kinds: what all lines say, also of those that are lifted, so that equal blocks are told apart by it.
    """

    texts: tuple[str, ...]
    choices: Decisions = field(default_factory=dict)
    somewhere: Decisions = field(default_factory=dict)
    storage: Decisions = field(default_factory=dict)
    handed: Decisions = field(default_factory=dict)
    lifetimes: Decisions = field(default_factory=dict)
    sharded: dict[str, int] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)
    keeps: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def said(self, line: int) -> str:
        """A line in words, for messages."""
        return f"pin {self.texts[line]!r}"


NOTHING_PINNED = PinnedProgram(texts=())


def find_pinned(program: Program, pins: Pins) -> PinnedProgram:
    """What the pins decide of a whole model's program, found once.

    Raises:
        PinError: if a pattern matches nothing, or says what nothing that it matches offers.
    """
    if not pins:
        return NOTHING_PINNED
    key = "pinned", pins
    if key not in program.made:
        program.made[key] = _Finder(program, pins).run()
    found: PinnedProgram = program.made[key]
    return found


def kind_of_pins(program: Program, pins: Pins) -> Callable[[str], tuple[object, ...]]:
    """Of the name of an op or parameter what lines say of it: equal for those that may decide alike."""
    if not pins.lines:
        return lambda name: ()
    kinds = find_pinned(program, pins).kinds
    return lambda name: kinds.get(name, ())


class _Finder:
    def __init__(self, program: Program, pins: Pins) -> None:
        self.program, self.pins = program, pins
        self.words = factor_words(program)
        self.found = PinnedProgram(texts=pins.texts)
        self.ops = {op.name: op for op in program.ops}
        self.lifted = pins.lifted if isinstance(pins, LiftedPins) else ()
        self.names = {spec.placeholder: spec.names for spec in program.captured.parameters}
        self.inputs = {spec.placeholder: (spec.path,) for spec in program.captured.inputs}

    def run(self) -> PinnedProgram:
        number = 0
        for line in self.pins.lines:
            matched = matcher(line.of, self.program, self.names, self.inputs, f"pin {str(line)!r}")
            for saying in line.says:
                self._say(number, saying, matched)
            number += 1
        for technique in self.pins.forbid:
            self._forbid(number, technique)
            number += 1
        for technique in self.pins.demand:
            self._demand(number, technique)
            number += 1
        return self.found

    def _add(self, table: Decisions, name: str, decision: Allowance, *, is_line: bool = True) -> None:
        if is_line:
            said = decision.on, tuple(sorted(map(str, decision.allowed)))
            self.found.kinds[name] = (*self.found.kinds.get(name, ()), said)
        if decision.line not in self.lifted:
            table[name] = (*table.get(name, ()), decision)

    def _say(self, line: int, saying: Saying, matched: Matcher) -> None:
        if saying.on == LIFETIME:
            parameters = self._some(line, matched.parameters, "parameter")
            for name in parameters:
                self._add(self.found.lifetimes, name, Allowance(line=line, on=EVERY, allowed=frozenset(saying.words)))
        elif saying.on == RECOMPUTE:
            self._recompute(line, saying.words == ("true",), self._some(line, matched.ops, "call"))
        else:
            placements = [placement_of(word) for word in saying.words]
            if all(placement is None for placement in placements):
                self._split(line, saying, matched)
            elif None in placements:
                raise PinError(
                    f"{self._said(line)}: {'|'.join(saying.words)} mixes placements and words of what is split; "
                    "write two pins"
                )
            else:
                self._place(line, saying.on, [p for p in placements if p is not None], matched)

    def _said(self, line: int) -> str:
        return self.found.said(line)

    def _some(self, line: int, names: tuple[str, ...], what: str) -> tuple[str, ...]:
        if not names:
            raise PinError(f"{self._said(line)}: the pattern matches no {what}; give the pattern of one")
        return names

    def _recompute(self, line: int, is_again: bool, names: Iterable[str], *, is_line: bool = True) -> None:
        for name in names:
            if is_line:
                self.found.kinds[name] = (*self.found.kinds.get(name, ()), (RECOMPUTE, is_again))
            if line in self.lifted:
                continue
            table, other = (self.found.again, self.found.keeps)[:: 1 if is_again else -1]
            if name in other:
                raise PinError(f"{self._said(line)} contradicts {self._said(other[name])} of {name}; leave one out")
            table[name] = line

    def _split(self, line: int, saying: Saying, matched: Matcher) -> None:
        ops = [self.ops[name] for name in self._some(line, matched.ops, "call")]
        is_asked = False
        for op in ops:
            allowed = self._offered(op, saying.words)
            if allowed:
                is_asked = True
                decision = Allowance(line=line, on=saying.on, allowed=frozenset(allowed))
                self._add(self.found.choices, op.name, decision)
        offered = {word_of(op, name, self.words) for op in ops for name in op.choices}
        known = sorted(offered - {SUMMANDS})
        if not is_asked:
            word = saying.words[0]
            raise PinError(
                f"{self._said(line)}: nothing that it matches ({_counted(len(ops), 'call')}) is split by "
                f"{' or '.join(saying.words)}; it offers {', '.join(known)}, or a placement "
                f"(shard(0), replicate, invariant, partial){near(word, known)}"
            )

    def _offered(self, op: Op, words: Iterable[str]) -> set[str]:
        """Choices by any of the words; none where an op offers none of the factors among them."""
        factors = {word for word in words if word not in ALWAYS_OFFERED}
        found = set(_split_by(op, factors, self.words))
        if factors and not found:
            return set()
        plain = {word for word in words if word in ALWAYS_OFFERED}
        return found | {name for name in op.choices if word_of(op, name, self.words) in plain}

    def _place(self, line: int, on: str, placements: list[Placement], matched: Matcher) -> None:
        if matched.parameters or matched.inputs:
            held = matched.parameters or matched.inputs
            table = self.found.storage if matched.parameters else self.found.handed
            if PARTIAL in placements:
                raise PinError(f"{self._said(line)}: a parameter or input is held whole or split, never partial")
            able = [name for name in held if any(_has_dim(self.program.tensors[name], p) for p in placements)]
            if not able:
                shapes = ", ".join(sorted({str(tuple(self.program.tensors[name].shape)) for name in held}))
                raise PinError(f"{self._said(line)}: nothing that it matches has such a dim; shapes are {shapes}")
            whole = {REPLICATE, INVARIANT} if {REPLICATE, INVARIANT} & set(placements) else set[Placement]()
            for name in able:
                self._add(table, name, Allowance(line=line, on=on, allowed=frozenset({*placements, *whole})))
            return
        for name in self._some(line, matched.outputs, "parameter, input or result"):
            op = self.ops[name]
            grad = op.result_grads[0]
            wanted = {_plain(p, grad) for p in placements}
            allowed = frozenset(n for n, choice in op.choices.items() if _plain(choice.results[0], grad) in wanted)
            if not allowed:
                offered = sorted({str(choice.results[0]) for choice in op.choices.values()})
                raise PinError(
                    f"{self._said(line)}: {name} {op.result_shapes[0]} can be {', '.join(offered)} on an axis, none of "
                    f"{', '.join(map(str, placements))}"
                )
            self._add(self.found.choices, name, Allowance(line=line, on=on, allowed=allowed))

    def _forbid(self, line: int, technique: str) -> None:
        if technique in FACTORS_OF:
            for op in self.program.ops:
                split = _split_by(op, FACTORS_OF[technique], self.words)
                if split:
                    decision = Allowance(line=line, on=EVERY, allowed=frozenset(op.choices) - split)
                    self._add(self.found.choices, op.name, decision, is_line=False)
        elif technique == "fsdp":
            for name in self.names:
                decision = Allowance(line=line, on=EVERY, allowed=frozenset({"always"}))
                self._add(self.found.lifetimes, name, decision, is_line=False)
        elif technique == "recompute":
            self._recompute(line, False, (op.name for op in self.program.ops), is_line=False)

    def _demand(self, line: int, technique: str) -> None:
        if technique in FACTORS_OF:
            asked = 0
            for op in self.program.ops:
                split = _split_by(op, FACTORS_OF[technique], self.words)
                if split and any(op.result_grads) and _is_meant(op, technique):
                    asked += 1
                    decision = Allowance(line=line, on=EVERY, allowed=split)
                    self._add(self.found.somewhere, op.name, decision, is_line=False)
            if not asked:
                raise PinError(f"{self._said(line)}: no call of {self.program.captured.name} can be split so")
        elif technique == "fsdp":
            for name in self.names:
                if self.program.tensors[name].requires_grad:
                    decision = Allowance(line=line, on=EVERY, allowed=frozenset({"use", "microbatch"}))
                    self._add(self.found.lifetimes, name, decision, is_line=False)
                    if line not in self.lifted:
                        self.found.sharded[name] = line
        elif technique == "recompute":
            self._recompute(line, True, (op.name for op in self.program.ops), is_line=False)


def _is_meant(op: Op, technique: str) -> bool:
    """Whether a technique is demanded of an op that can be split so: of those that read parameters and of products; of
    the sequence, as Megatron-LM has it, of what lies between these (norms)."""
    is_product = op.rule.product is not None or op.rule.is_attention
    if technique == "sequence parallel":
        return bool(op.parameters) and not is_product and not op.rule.looked_up
    return bool(op.parameters) or is_product


def _split_by(op: Op, words: Iterable[str], known: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    """Choices that split a factor of these words, or names, which has more than one part."""
    asked = set(words)
    sizes = {name: factor.size for name, factor in op.rule.factors.items()}
    return frozenset(
        name for name in op.choices if sizes.get(name, 0) > 1 and ({name, word_of(op, name, known)} & asked)
    )


def _plain(placement: Placement, needs_gradient: bool) -> Placement:
    return REPLICATE if placement == INVARIANT and not needs_gradient else placement


def _has_dim(tensor: Tensor, placement: Placement) -> bool:
    return not isinstance(placement, Shard) or (placement.dim < len(tensor.shape) and tensor.shape[placement.dim] > 1)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def violations(pinned: PinnedProgram, plans: Sequence[StagePlan]) -> Iterator[str]:
    """What plans of the program's stages decide otherwise than pins say, in words."""
    for plan in plans:
        held = {name: layout.axes for name, layout in plan.layouts.items()}
        for table, chosen in ((pinned.choices, plan.choices), (pinned.storage, held), (pinned.handed, held)):
            for name, decisions in table.items():
                for one in decisions if name in chosen else ():
                    yield from _broken(pinned, one, name, chosen[name], plan.mesh)
        for name, decisions in pinned.somewhere.items():
            for one in decisions if plan.mesh.size > 1 else ():
                if name in plan.choices and not one.allowed & set(plan.choices[name]):
                    yield f"{pinned.said(one.line)}: {name} is split by {plan.choices[name]}"
        for name, decisions in pinned.lifetimes.items():
            lived = plan.lifetimes.get(name)
            for one in decisions if lived is not None else ():
                if not lives_as_pinned(lived or "", one.allowed, plan.microbatches):
                    yield f"{pinned.said(one.line)}: a copy of {name} lives for {lived!r}"
        for name in sorted((plan.recompute | plan.remade.keys()) & pinned.keeps.keys()):
            yield f"{pinned.said(pinned.keeps[name])}: {name} is run again"
    done = {pinned.again[name] for plan in plans for name in plan.recompute & pinned.again.keys()}
    for line in sorted({*pinned.again.values()} - done):
        yield f"{pinned.said(line)}: nothing that it matches is run again"


def lives_as_pinned(lifetime: str, allowed: frozenset[Word], microbatches: int) -> bool:
    """Whether a parameter's lifetime is one of these. One that is never gathered is; of one micro-batch, a step and a
    micro-batch are the same."""
    words = {lifetime, "step"} if lifetime == "microbatch" and microbatches == 1 else {lifetime}
    return lifetime == "always" or bool(words & allowed)


def _broken(pinned: PinnedProgram, one: Allowance, name: str, chosen: tuple[Word, ...], mesh: Mesh) -> Iterator[str]:
    for axis, size, word in zip(mesh.names, mesh.shape, chosen, strict=True):
        if size > 1 and one.holds_on(axis) and word not in one.allowed:
            allowed = " or ".join(sorted(map(str, one.allowed)))
            yield f"{pinned.said(one.line)}: {name} is {word} on {axis}, not {allowed}"
