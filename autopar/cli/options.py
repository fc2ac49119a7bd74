"""What do options of a command line say? Numbers of their domains, and `--set` pairs, read before any work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.errors import ArgumentError, MeshError
from autopar.values.domains import COUNT, GAP, MEMORY_GB, MOST_PROCESSES, POSITIVE, SECONDS, Domain, checked_number
from autopar.values.mesh import parse_mesh
from autopar.values.pins import Pins, joined, parse_pin
from autopar.values.pins_file import load_pins

RANDOM_PLANS = Domain(least=0, most=10**6)
SEED = Domain(least=0, most=2**63)
PROCESSES = Domain(most=MOST_PROCESSES)
PORT = Domain(most=2**16 - 1)
RESTARTS = Domain(least=0, most=10**6)

OPTIONS: Mapping[str, Domain] = {
    "--global-batch": POSITIVE,
    "--seq": POSITIVE,
    "--microbatches": COUNT,
    "--pipeline": COUNT,
    "--memory-gb": MEMORY_GB,
    "--gap": GAP,
    "--seconds": SECONDS,
    "--random": RANDOM_PLANS,
    "--seed": SEED,
    "--per-node": PROCESSES,
    "--port": PORT,
    "--restarts": RESTARTS,
}


def check_options(**given: Any) -> None:
    """Raises ArgumentError, naming the option, for a number that is given and outside its domain."""
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None:
            checked_number(option, value, OPTIONS[option])


def check_processes(mesh: str | None) -> None:
    """Raises MeshError if a mesh has more ranks than one machine can be asked to start."""
    if mesh is not None and (own := parse_mesh(mesh)).size > MOST_PROCESSES:
        raise MeshError(
            f"mesh {own} asks for {own.size} processes of this machine; at most {MOST_PROCESSES} are started"
        )


def number_or_auto(text: str | None, option: str) -> int | Literal["auto"] | None:
    """A number of micro-batches or of pipeline ranks.

    Raises:
        ArgumentError: if it is neither `auto` nor a number of the option's domain.
    """
    if text is None or text == "auto":
        return None if text is None else "auto"
    value = int(text) if text.isdecimal() and len(text) <= 20 else text
    checked_number(option, value, OPTIONS[option])
    return int(value)


def overrides(pairs: list[str] | None) -> dict[str, str]:
    """`["a=1", "b.c=x"]` as a mapping.

    Raises:
        ArgumentError: if a pair has no `=`.
    """
    out = {}
    for pair in pairs or ():
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ArgumentError(f"--set {pair}: write it as key=value")
        out[key.strip()] = value
    return out


def pins_from(lines: list[str] | None, file: Path | None) -> Pins:
    """The pins of `--pin` lines and of a `--pins` file together.

    Raises:
        PinError: if one is none.
    """
    own = [parse_pin(line) for line in lines or ()]
    return joined([*([load_pins(file)] if file is not None else []), *own])
