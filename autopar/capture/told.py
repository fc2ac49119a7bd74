"""What is a value in a frame asked for? To tell a person, as one of several that are asked about, or as a length."""

import ast
import dis
from collections.abc import Callable
from types import FrameType

from autopar.capture.complaints import name_of, only_tells
from autopar.capture.sources import COMPARED, asked, evaluate, function_of, source_of, statement_of

_IN_PARTS, _METHODS_IN_PARTS = {"max", "min", "sorted", "any", "filter", "next"}, {"sort", "index", "count", "remove"}
"""Functions of Python that ask about their arguments, or their members, one by one; methods that do."""


def is_told(frame: FrameType) -> bool:
    """Whether what is made in a frame now is read by people only: in a call that tells, an error, or a variable that
    nothing else reads."""
    source = source_of(frame.f_code.co_filename)
    around = [
        node
        for node in (ast.walk(source.tree) if source is not None else ())
        if isinstance(node, ast.stmt) and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
    ]
    statement = max(around, key=lambda node: (node.lineno, node.col_offset), default=None)
    if source is None or statement is None:
        return False
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return _is_telling(statement)
    function = function_of(statement, source)
    name = statement.targets[0].id
    loads = [n for n in ast.walk(function or source.tree) if isinstance(n, ast.Name) and n.id == name]
    readers = [statement_of(n, source) for n in loads if isinstance(n.ctx, ast.Load)]
    return function is not None and len(statement.targets) == 1 and all(map(_is_telling, readers))


def _is_telling(statement: ast.stmt) -> bool:
    is_idle = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.JoinedStr)
    return is_idle or isinstance(statement, ast.Raise) or only_tells([statement])


def is_part_of_answer(frame: FrameType) -> bool:
    """Whether a truth asked for in a frame is one of several that make up a value: of `x in (1, 2)`, `max(x, y)`."""
    opname = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    source = source_of(frame.f_code.co_filename) if opname.startswith(("CALL", "PRECALL")) else None
    node = None if source is None else asked(frame, source)
    if not isinstance(node, ast.Call):
        return opname == "CONTAINS_OP"
    return name_of(node.func) in (_IN_PARTS if isinstance(node.func, ast.Name) else _METHODS_IN_PARTS)


def length_asked(frame: FrameType, length: int, answer: Callable[[bool], bool]) -> int | None:
    """For `len(x)` that is compared in `frame`: a length of which the comparison is as `answer` says, given what it is
    of `length`; None where the length is used otherwise."""
    source = source_of(frame.f_code.co_filename)
    node = None if source is None else asked(frame, source)
    parent = None if source is None or node is None else source.parents.get(node)
    if not isinstance(parent, ast.Compare) or len(parent.ops) > 1 or type(parent.ops[0]) not in COMPARED:
        return None
    compare, is_left = COMPARED[type(parent.ops[0])], parent.left is node
    other = evaluate(parent.comparators[0] if is_left else parent.left, frame)
    if isinstance(other, bool) or type(other) not in (int, float):
        return None

    def holds(number: int) -> bool:
        return bool(compare(number, other) if is_left else compare(other, number))

    wanted = answer(holds(length))
    near = (length, int(other), int(other) + 1, int(other) - 1)
    return next((number for number in near if number >= 0 and holds(number) is wanted), length)


def is_identified(frame: FrameType) -> bool:
    """Whether forward asks which object a call in a frame gives (`is True`), or of which very type, there or by the
    variable that it gives it to."""
    source = source_of(frame.f_code.co_filename)
    node = None if source is None else asked(frame, source)
    if source is None or node is None:
        return False
    parent = source.parents.get(node)
    places: list[ast.AST] = [node]
    function = function_of(node, source)
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name) and function is not None:
        name = parent.targets[0].id
        places += [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    return any(_identifies(source.parents.get(place), place) for place in places)


def _identifies(parent: ast.AST | None, place: ast.AST) -> bool:
    if isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.Is | ast.IsNot):
        sides = [parent.left, *parent.comparators]
        return any(side is not place and not (isinstance(side, ast.Constant) and side.value is None) for side in sides)
    return isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in ("type", "id")
