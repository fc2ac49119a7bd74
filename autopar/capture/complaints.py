"""What does a branch do that is no part of the model? It raises, or it tells a person; and what it says."""

import ast
from collections.abc import Sequence

TELLERS = {"print", "warn", "warning", "warn_once", "warning_once", "info", "debug", "error", "log", "rank_zero_warn"}
"""Functions and methods whose calls are read by people only."""


def only_raises(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements end in an error on every path."""
    last = statements[-1]
    if any(
        isinstance(node, ast.Return | ast.Break | ast.Continue | ast.Yield) for s in statements for node in ast.walk(s)
    ):
        return False
    if isinstance(last, ast.Raise):
        return True
    if isinstance(last, ast.Assert):
        return isinstance(last.test, ast.Constant) and not last.test.value
    return isinstance(last, ast.If) and bool(last.orelse) and only_raises(last.body) and only_raises(last.orelse)


def only_tells(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements do no more than print, log and warn."""
    return all(
        isinstance(s, ast.Pass)
        or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and name_of(s.value.func) in TELLERS)
        for s in statements
    )


def raised(statements: Sequence[ast.stmt]) -> str:
    last = statements[-1]
    while isinstance(last, ast.If):
        last = last.body[-1]
    if isinstance(last, ast.Assert):
        return "AssertionError" if last.msg is None else f"AssertionError: {text_of(last.msg)}"
    assert isinstance(last, ast.Raise)
    if last.exc is None:
        return "an error is raised again"
    if isinstance(last.exc, ast.Call):
        return ": ".join([name_of(last.exc.func), *(text_of(argument) for argument in last.exc.args[:1])])
    return ast.unparse(last.exc)


def text_of(message: ast.expr) -> str:
    """A message as written, its constant parts joined."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.Lambda):
        return text_of(message.body)
    if isinstance(message, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.FormattedValue) else p for p in message.values]
        return "".join(str(p.value) if isinstance(p, ast.Constant) else f"{{{ast.unparse(p)}}}" for p in parts)
    return ast.unparse(message)


def name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
