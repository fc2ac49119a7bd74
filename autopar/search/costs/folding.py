"""Which ops, tensors and parameters share one decision? Those of repeated blocks.

Ops are of one class if they come at the same place of modules whose paths differ in numbers only, and cost the same
(target, constant arguments, shapes, dtypes, gradients). Tensors travel alike if their producers are of one class and
their readers are of the same classes: a block's output that the next block reads is another kind of tensor than the
last block's output. So a folded cost is exactly the unfolded one: a price times how often it is paid.
"""

from collections.abc import Callable
from dataclasses import dataclass

from autopar.lower.pinned import kind_of_pins
from autopar.lower.program import Program
from autopar.lower.redistributions import SINK
from autopar.values.pins import NO_PINS, Pins

Signature = frozenset[tuple[int, int]]
"""(class of the reading op, operand) of every reader; the graph's output is class SINK."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Folding:
    """`class_of[position]`; `instances[class]`: positions in order; `travellers[kind]`: tensors that travel alike.

    signatures: how each kind of tensor is read.
    """

    class_of: tuple[int, ...]
    instances: tuple[tuple[int, ...], ...]
    travellers: tuple[tuple[str, ...], ...]
    signatures: tuple[Signature, ...]


def pattern(path: str) -> str:
    """A module path with its numbers left out: `layers.3.mlp` -> `layers.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def fold_program(program: Program, *, fold: bool = True, pins: Pins = NO_PINS) -> Folding:
    """Classes of ops and tensors; without `fold` each is a class of its own. One for all programs of a form.

    pins: what is pinned otherwise is of another class.
    """
    key = ("folding", fold, pins.lines)
    if key not in program.form:
        program.form[key] = _folded(program, fold, kind_of_pins(program, pins))
    found: Folding = program.form[key]
    return found


def _folded(program: Program, fold: bool, kind_of: Callable[[str], object]) -> Folding:
    ordinals: dict[str, int] = {}
    classes: dict[object, int] = {}
    class_of: list[int] = []
    for op in program.ops:
        ordinal = ordinals[op.module] = ordinals.get(op.module, -1) + 1
        key: object = (pattern(op.module), ordinal, op.signature, kind_of(op.name)) if fold else op.position
        class_of.append(classes.setdefault(key, len(classes)))
    instances: list[list[int]] = [[] for _ in classes]
    for position, number in enumerate(class_of):
        instances[number].append(position)
    names = {p.placeholder: pattern(p.names[0]) for p in program.captured.parameters}
    kinds: dict[object, list[str]] = {}
    signatures: list[Signature] = []
    outputs = {program.loss, *program.mutated}
    for name, tensor in program.tensors.items():
        readers = {(class_of[p], slot) for p, slot in program.readers[name]}
        if name in outputs:
            readers.add((SINK, 0))
        signature = frozenset(readers)
        if not signature and tensor.kind != "parameter":
            continue
        origin: object = name
        if fold and tensor.producer is not None:
            origin = (class_of[tensor.producer], tensor.index)
        elif fold and tensor.kind == "parameter":
            origin = (names[name], tensor.shape, tensor.dtype, tensor.requires_grad, kind_of(name))
        kind = (origin, signature)
        if kind not in kinds:
            signatures.append(signature)
        kinds.setdefault(kind, []).append(name)
    return Folding(
        class_of=tuple(class_of),
        instances=tuple(map(tuple, instances)),
        travellers=tuple(map(tuple, kinds.values())),
        signatures=tuple(signatures),
    )
