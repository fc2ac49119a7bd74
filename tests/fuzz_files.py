"""What do files do that somebody else wrote? Mutants of a file are read, and what is read must be right.

    python -m tests.fuzz_files plan --mutants 5000 --seed 0        plan, staged, cluster or specs

A mutant is a valid file in which one to three things are changed by `mutant`: a value of another type, number or size,
a word of another place of the file, something doubled, taken out or moved, bytes cut off or overwritten. Each is
answered by a typed error within `LIMIT` seconds, or is a file of the same kind whose result is right: a plan trains as
one process does, a cluster is written and read again as the same value. Nothing that a file names runs.
"""

import argparse
import copy
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError

LIMIT = 10.0
"""Seconds that the answer to a file may take."""

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 63, -(1 << 63), 10**40, 0.5, -0.0, 1e300, float("nan"),
    float("inf"), "", "x", "S0", "S9", "R", "P", "I", "S0,R", "P,P", "S0,S0:10", "S0:1", "replicate", "always", "use",
    "\x00", "é", "../../x", "__import__('os')", "a" * 5000, [], {}, [[]], [None], {"": None}, {"a": {"b": []}},
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """What became of mutants."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """A value's place: `container[key]`; group: of places that hold values of one kind."""

    container: Any
    key: Any
    group: tuple[Any, ...]

    @property
    def value(self) -> Any:
        return self.container[self.key]


def places(body: Any) -> list[Place]:
    """Every place below `body`."""
    found: list[Place] = []
    stack: list[tuple[Any, tuple[Any, ...]]] = [(body, ())]
    while stack:
        one, path = stack.pop()
        keys: Any = one.keys() if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            below = (*path, key) if isinstance(key, str) and len(path) < 2 else path
            found.append(Place(one, key, (*path[:2], type(one[key]), isinstance(one, dict))))
            stack.append((one[key], below))
    return found


def mutated(body: Any, rng: random.Random) -> Any:
    """A copy with one thing changed; half of the changes put a value where another of its kind stands."""
    body = copy.deepcopy(body)
    found = places(body)
    at, other = rng.choice(found), rng.choice(found)
    container, key, value = at.container, at.key, at.value
    alike = rng.choice([place for place in found if place.group == at.group])
    match rng.randrange(14):
        case 0:
            container[key] = copy.deepcopy(rng.choice(ODD))
        case 1:
            container[key] = copy.deepcopy(other.value)
        case 2:
            del container[key]
        case 3 if isinstance(container, dict):
            container[rng.choice(["x", "", f"{key}_", "schema"])] = copy.deepcopy(value)
        case 4 if isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), copy.deepcopy(value))
        case 5:
            container[key], other.container[other.key] = copy.deepcopy(other.value), copy.deepcopy(value)
        case 6 if isinstance(value, int | float) and not isinstance(value, bool):
            container[key] = rng.choice([value + 1, value - 1, 2 * value, -value, value / 2, 0])
        case 7 if isinstance(value, str) and value:
            place = rng.randrange(len(value))
            inside = rng.choice(["", "x", "0", "1", "S", ",", '"', "\n", value])
            container[key] = value[:place] + inside + value[place + 1 :]
        case 8 if isinstance(container, dict) and isinstance(alike.container, dict):  # under the name of another
            container[alike.key] = container.pop(key)
        case 9 if isinstance(value, int) and not isinstance(value, bool):
            container[key] = rng.randrange(20)
        case 10 if isinstance(value, bool):
            container[key] = not value
        case _:
            container[key], alike.container[alike.key] = (
                copy.deepcopy(alike.value),
                copy.deepcopy(rng.choice((value, alike.value))),
            )
    return body


def mutant(body: Any, write: Callable[[Any], str], rng: random.Random) -> bytes:
    """The bytes of a file like `body`, changed in one to three places, or in bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.9:
            body = mutated(body, rng) or body
    text = write(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.08:
        at, many = rng.randrange(len(text) + 1), rng.choice((1, 1, 8, 100))
        text = text[:at] + rng.choice((b"", rng.randbytes(many), text[at : at + many] * 2)) + text[at + many :]
    if rng.random() < 0.02:
        text = text[: rng.randrange(len(text) + 1)]
    if rng.random() < 0.01:
        text = b"[" * rng.choice((10, 100_000)) + text
    return text


def fuzz(
    body: Any, write: Callable[[Any], str], answer: Callable[[Path], str], mutants: int, seed: int
) -> Iterator[Tally]:
    """Tallies as mutants are answered; `answer` says what a file is, or raises AssertionError if it is wrong."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant"
        for number in range(mutants):
            rng = random.Random(f"{seed}/{number}")
            path.write_bytes(mutant(body, write, rng))
            began = time.perf_counter()
            try:
                said = answer(path)
            except AutoparError as error:
                said = type(error).__name__
            except BaseException as error:  # whatever it is, it is a fault
                if isinstance(error, KeyboardInterrupt):
                    raise
                said = f"fault: {type(error).__name__}"
                tally.faults.append(f"mutant {number}: {type(error).__name__}: {str(error)[:300]}")
            seconds = time.perf_counter() - began
            if seconds > LIMIT:
                tally.faults.append(f"mutant {number}: took {seconds:.1f} s")
            tally.slowest = max(tally.slowest, seconds)
            tally.answers[said] += 1
            yield tally


def report(what: str, tally: Tally) -> None:
    """One line a kind of answer, then the faults."""
    print(f"{what}: {sum(tally.answers.values())} mutants, the slowest {tally.slowest:.2f} s")
    for said, count in tally.answers.most_common():
        print(f"    {count:6} {said}")
    for fault in tally.faults[:20]:
        print(f"    {fault}", flush=True)


def page(tallies: dict[str, Tally], command: str) -> str:
    """The results as a page of the manual."""
    rows = []
    for name, tally in tallies.items():
        right = tally.answers["right"]
        refused = sum(count for said, count in tally.answers.items() if said != "right" and "fault" not in said)
        counts = (right + refused + len(tally.faults), refused, right, len(tally.faults), f"{tally.slowest:.1f}")
        rows.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join([
        "# Files that somebody else wrote",
        "",
        f"Written by `{command}` with torch {torch.__version__}.",
        "",
        "A mutant is a valid file with 1 to 3 changes. It is refused by a typed error, or is right: a plan trains",
        "as one process does (float64: loss to 1e-10, gradients to 1e-8, bytes as predicted), a cluster is written and",
        "read again as the same value, specs and manifests say what they said, a config is built or refused. Anything",
        "else is a fault: an untyped error, another result, something that a file names run, or more than 10 s.",
        "",
        "| file | mutants | refused | right | faults | slowest (s) |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ])  # fmt: skip


def main() -> None:
    from tests.fuzzed_formats import FORMATS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=(*FORMATS, "all"))
    parser.add_argument("--mutants", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a page of results, as docs/results/files.md")
    asked = parser.parse_args()
    tallies: dict[str, Tally] = {}
    for name in FORMATS if asked.format == "all" else (asked.format,):
        *_, tallies[name] = fuzz(*FORMATS[name](), asked.mutants, asked.seed)
        report(f"{name}, seed {asked.seed}", tallies[name])
    if asked.write is not None:
        asked.write.write_text(page(tallies, f"python -m tests.fuzz_files {' '.join(sys.argv[1:])}"))
    sys.exit(1 if any(tally.faults for tally in tallies.values()) else 0)


if __name__ == "__main__":
    main()
