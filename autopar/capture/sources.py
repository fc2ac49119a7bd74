"""Where in the source does a frame stand? The expression that it asks a question in, and what is around it."""

import ast
import dis
import linecache
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

from autopar.capture.complaints import name_of, only_raises

TESTED = (ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True, slots=True)
class CodeSource:
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    at: dict[tuple[int, int, int, int], list[ast.expr]]
    guarded: tuple[tuple[int, int], ...]
    """Lines whose errors are caught."""


def asked(frame: FrameType, source: CodeSource) -> ast.expr | None:
    """The expression whose value the current instruction tests, or that it calls.

    Jumps carry the position of the statement in some versions of Python, so that what was computed just before says it.
    """
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    opname = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    is_call = opname.startswith(("CALL", "PRECALL"))
    for place in (index,) if is_call else range(index, max(index - 3, -1), -1):
        line, end_line, column, end_column = positions[place]
        if line is None or end_line is None or column is None or end_column is None:
            continue
        for node in source.at.get((line, column, end_line, end_column), ()):
            is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
            if not is_not and not isinstance(node, TESTED):
                return node
    return None


def evaluate(expression: ast.expr, frame: FrameType) -> Any:
    return eval(compile(ast.Expression(expression), "<check>", "eval"), frame.f_globals, frame.f_locals)


def statement_of(node: ast.AST, source: CodeSource) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = source.parents[node]
    return node


def function_of(node: ast.AST | None, source: CodeSource) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    while node is not None and not isinstance(node, FUNCTIONS):
        node = source.parents.get(node)
    return node


def source_of(filename: str) -> CodeSource | None:
    lines = linecache.getlines(filename)
    return _parsed("".join(lines)) if lines else None


@lru_cache(maxsize=64)
def _parsed(text: str) -> CodeSource | None:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    parents, at = dict[ast.AST, ast.AST](), dict[tuple[int, int, int, int], list[ast.expr]]()
    guarded: list[tuple[int, int]] = []
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            parents[child] = node
        if isinstance(node, ast.expr) and node.end_lineno is not None and node.end_col_offset is not None:
            at.setdefault((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset), []).append(node)
        if isinstance(node, ast.Try | ast.With) and _catches(node):
            guarded.append((node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno))
    return CodeSource(tree, parents, at, tuple(guarded))


def _catches(node: ast.Try | ast.With) -> bool:
    if isinstance(node, ast.Try):
        return any(not only_raises(handler.body) for handler in node.handlers)
    calls: list[Any] = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(name_of(call.func) == "suppress" for call in calls)
