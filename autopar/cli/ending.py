"""How does a command end? With one answer on standard output, and one exit code.

    0    done
    1    beyond tolerance (verify, calibrate --check)
    2    bad input, said in one message
    3    a fault of autopar itself; its message names the file that holds the traceback
    130  interrupted
    141  whoever read standard output has gone

A traceback is printed where a person asks for it, with `--debug` or AUTOPAR_DEBUG=1.

With `--json` standard output holds one JSON object and nothing else, an error included: `{"error": ..., "kind": ...}`.
"""

import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from rich.console import Console

from autopar.errors import AutoparError
from autopar.report.plain import WIDTH, PlainConsole

BAD_INPUT, FAULT, INTERRUPTED, NO_READER = 2, 3, 130, 141
COMPLETION, COMPLETE_VARIABLE = ("--install-completion", "--show-completion"), "_AUTOPAR_COMPLETE"
DEBUG = "--debug"
DEBUG_VARIABLE = "AUTOPAR_DEBUG"
LONGEST = 500
"""Characters of a fault's first line that are said."""


class NoReaderError(Exception):
    """Standard output is a pipe that nobody reads any more."""


class _Console(PlainConsole):
    def on_broken_pipe(self) -> None:
        raise NoReaderError


def console_of(as_json: bool) -> Console:
    """Where words go: to standard output, unless that is for JSON alone."""
    if as_json:
        return PlainConsole(stderr=True, quiet=True)
    return _Console() if sys.stdout.isatty() else _Console(width=WIDTH)


@contextmanager
def one_answer(as_json: bool) -> Iterator[dict[str, Any]]:
    """With `--json`, whatever libraries print goes to standard error, and the answer is printed at the end."""
    answer: dict[str, Any] = {}
    if not as_json:
        yield answer
        return
    with redirect_stdout(sys.stderr):
        yield answer
    print_json(answer)


def print_json(answer: dict[str, Any]) -> None:
    """One object, null for what is no number (JSON has no NaN).

    Raises:
        NoReaderError: if nobody reads it.
    """
    try:
        print(json.dumps(_finite(answer), indent=1), flush=True)
    except BrokenPipeError as error:
        raise NoReaderError from error


def ended(command: Callable[..., Any], given: Sequence[str]) -> int:
    """The exit code of a command, its error said."""
    as_json, is_shells = "--json" in given, _asked_by_a_shell(given)
    is_debugged = DEBUG in given or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    given = [word for word in given if word != DEBUG]  # wherever it stands
    try:
        code = command(given, prog_name="autopar", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (NoReaderError, BrokenPipeError):
        return _without_reader()
    except BaseException as error:
        if isinstance(error.__context__, BrokenPipeError):  # click's own end of a help that nobody reads
            return _without_reader()
        if is_shells and isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else 0
        if is_debugged:
            traceback.print_exception(error)
        try:
            return _said(error, as_json)
        except NoReaderError:
            return _without_reader()


def _asked_by_a_shell(given: Sequence[str]) -> bool:
    """Whether this is about completion in a shell, which typer does and ends itself."""
    return COMPLETE_VARIABLE in os.environ or bool(given and given[0] in COMPLETION)


def _said(error: BaseException, as_json: bool) -> int:
    """Say what is wrong, once. Usage errors are click's; where click lives depends on the version of typer."""
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt | EOFError):
        return _fail("interrupted", "KeyboardInterrupt", as_json, INTERRUPTED)
    if isinstance(error, AutoparError):
        return _fail(getattr(error, "at_shell", None) or str(error), type(error).__name__, as_json)
    if isinstance(error, SystemExit):
        return _fail(f"code that the command ran ended it: exit code {error.code}", "SystemExit", as_json)
    if (format_message := getattr(error, "format_message", None)) is not None:
        usage = format_message().rstrip(".") or "name a command"
        path = getattr(getattr(error, "ctx", None), "command_path", "autopar")
        return _fail(f"{usage} ({path} --help lists what there is)", "ArgumentError", as_json)
    first = str(error).strip().partition("\n")[0][:LONGEST]
    said = f"a fault of autopar: {type(error).__name__}: {first}; please report it with its traceback, {_kept(error)}"
    return _fail(said, type(error).__name__, as_json, FAULT)


def _kept(error: BaseException) -> str:
    """Where the traceback of an error is: in a file of its own, for to run again may take long."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="autopar-fault-", suffix=".txt", delete=False) as file:
            file.writelines(traceback.format_exception(error))
        return f"which is in {file.name}"
    except OSError:
        return f"which {DEBUG} prints"


def _fail(message: str, kind: str, as_json: bool, code: int = BAD_INPUT) -> int:
    if as_json:
        print_json({"error": message, "kind": kind})
    else:
        print(f"autopar: {message}", file=sys.stderr)
    return code


def _without_reader() -> int:
    """Let nothing more be written, the interpreter's last flush included."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return NO_READER


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
