"""Sets of pins at random, each line of which some plan of the program on the mesh honours."""

import random
from dataclasses import replace
from typing import Any

from autopar.errors import ImpossiblePinError, PinError
from autopar.lower.factor_words import factor_words, word_of
from autopar.lower.pinned import find_pinned
from autopar.lower.program import Op, Program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.storages import input_layouts, storages
from autopar.search.graph.pinned import check_possible
from autopar.values.blocks import block_of
from autopar.values.lifetimes import LIFETIMES
from autopar.values.pins import LIFETIME, RECOMPUTE, Pins, pins_of
from autopar.values.placement import Layout

FORBIDDEN = ("sequence parallel", "recompute", "fsdp", "vocabulary parallel")
TRIES = 20


def pinned_pricer(pricer: Pricer, pins: Pins) -> Pricer:
    """The same prices under pins."""
    config = replace(pricer.config, pins=pins)
    return make_pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=config)


def random_pins(program: Program, pricer: Pricer, rng: random.Random, lines: int = 4) -> Pins:
    """Up to so many lines of all kinds; one that cannot be honoured beside the others is drawn anew."""
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["forbid"] = [rng.choice(FORBIDDEN)]
    for _ in range(rng.randint(1, lines)):
        for _ in range(TRIES):
            pattern, said = rng.choice(LINES)(program, pricer, rng)
            if pattern not in found and is_possible(pins_of({**found, pattern: said}), program, pricer):
                found[pattern] = said
                break
    return pins_of(found)


def is_possible(pins: Pins, program: Program, pricer: Pricer) -> bool:
    """Whether every op and parameter has a choice left by itself."""
    try:
        check_possible(find_pinned(program, pins), program, pinned_pricer(pricer, pins))
    except (PinError, ImpossiblePinError):
        return False
    return True


def _some_of(name: str, rng: random.Random) -> str:
    """A pattern of a dotted name: itself, or with its numbers, or all but its end, left open."""
    parts = name.split(".")
    kind = rng.choice(("itself", "numbers", "end"))
    if kind == "end":
        return f"*{parts[-1]}"
    return ".".join("*" if part.isdigit() else part for part in parts) if kind == "numbers" else name


def _trained(program: Program, rng: random.Random) -> Op:
    return rng.choice([op for op in program.ops if any(op.result_grads)])


def _split(program: Program, pricer: Pricer, rng: random.Random) -> tuple[str, Any]:
    op, words = _trained(program, rng), factor_words(program)
    word = word_of(op, rng.choice(list(op.choices)), words)
    name = op.module if op.module and rng.random() < 0.5 else f"{op.module}.{op.name}"
    return _some_of(name, rng), {rng.choice(pricer.mesh.names): word}


def _placements(layout: Layout, pricer: Pricer, rng: random.Random) -> dict[str, str]:
    axes = dict(zip(pricer.mesh.names, map(str, layout.axes), strict=True))
    return {axis: axes[axis] for axis in rng.sample(sorted(axes), rng.randint(1, len(axes)))}


def _result(program: Program, pricer: Pricer, rng: random.Random) -> tuple[str, Any]:
    op, axis = _trained(program, rng), rng.choice(pricer.mesh.names)
    return f"op:{op.module}.{op.name}", {axis: str(rng.choice(list(op.choices.values())).results[0])}


def _storage(program: Program, pricer: Pricer, rng: random.Random) -> tuple[str, Any]:
    spec = rng.choice(program.captured.parameters)
    layout = rng.choice(storages(spec.shape, pricer.mesh, spec.trainable, False))
    return _some_of(spec.names[0], rng), _placements(layout, pricer, rng)


def _lifetime(program: Program, pricer: Pricer, rng: random.Random) -> tuple[str, Any]:
    return _some_of(rng.choice(program.captured.parameters).names[0], rng), {LIFETIME: rng.choice(LIFETIMES[:3])}


def _recompute(program: Program, pricer: Pricer, rng: random.Random) -> tuple[str, Any]:
    blocks = list(dict.fromkeys(block for op in program.ops if (block := block_of(op.module))))
    return rng.choice(blocks), {RECOMPUTE: rng.random() < 0.5}


def _input(program: Program, pricer: Pricer, rng: random.Random) -> tuple[str, Any]:
    spec = rng.choice(program.captured.inputs)
    layout = rng.choice(input_layouts(spec.shape, pricer.mesh))
    return f"input:{spec.path}", _placements(layout, pricer, rng)


LINES = (_split, _split, _result, _storage, _lifetime, _recompute, _input)
