"""What do options of a command line say? Numbers of their domains, and `--set` pairs, read before any work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import typer

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


def given_options(context: typer.Context) -> list[str]:
    """The options that a command line gives, by their names."""
    options = (parameter for parameter in context.command.params if parameter.param_type_name == "option")
    given = ((context.get_parameter_source(option.name), option.opts[0]) for option in options if option.name)
    return [name for source, name in given if source is not None and source.name == "COMMANDLINE"]


def check_processes(mesh: str | None) -> None:
    """Raises MeshError if a mesh has more ranks than one machine can be asked to start."""
    if mesh is not None and (own := parse_mesh(mesh)).size > MOST_PROCESSES:
        raise MeshError(
            f"mesh {own} asks for {own.size} processes of this machine; at most {MOST_PROCESSES} are started"
        )


def make_folders(**given: Path | None) -> None:
    """Make the folders of files that are written last, before any work.

    Raises:
        ArgumentError: naming the option, if one cannot be made.
    """
    for name, path in given.items():
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"--{name} {path}: its folder cannot be made ({error.strerror}); name a file elsewhere"
            ) from error


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
