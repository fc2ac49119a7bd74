"""Is a question about a tensor's value a check? It is where the value decides no more than whether the model complains.

`if not torch.isfinite(x).all(): raise ValueError(...)`, an assertion, a warning: of the two branches one only raises
(or only tells), so the other is the model, and the question becomes a condition that runs with it. Which expression is
tested stands in the positions of the caller's code and in the syntax tree of its source.

`not`, `and`, `or` and `bool()` between the tested expression and the statement are followed, `return` to the caller,
and a variable to the only tests that read it.
"""

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor

from autopar.capture.complaints import name_of, only_raises, only_tells, raised, text_of
from autopar.capture.sources import COMPARED, CodeSource, asked, evaluate, function_of, source_of
from autopar.capture.user_frame import is_machinery

CHECKERS = {"_check", "_check_value", "_check_index", "_check_type", "_check_not_implemented", "_assert"}
"""Functions of torch that raise where their first argument is false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """A tested value as part of a statement that only raises or tells.

    wanted: the value without a complaint. others: tests that must all be answered wrongly too before there is one, each
    with its wanted value, in the order in which Python asks. frame: where names in them are looked up. raises: whether
    it is an error or only something to read. message: of the complaint.
    """

    wanted: bool
    others: tuple[tuple[ast.expr, bool], ...]
    frame: FrameType
    raises: bool
    message: str


@dataclass(frozen=True, slots=True)
class _Root:
    """A statement that complains where a test is not `wanted`."""

    wanted: bool
    statement: ast.stmt | ast.expr
    complaint: str
    raises: bool


def find_check(frame: FrameType, stop: CodeType) -> ValueCheck | None:
    """The check whose test asks a question in `frame`; None for what is no check, or one whose error is caught.

    stop: the code of the function that calls the model, beyond which nobody looks.
    """
    found = _climb(frame, stop)
    if found is None or (found.raises and _is_caught(frame, stop)):
        return None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A number is asked for and compared with `other`, which a check tests. compare: of the two in this order."""

    check: ValueCheck
    compare: Callable[[Any, Any], Any]
    other: float

    @property
    def answer(self) -> float:
        """A number of which the comparison is as wanted."""
        near = (self.other, self.other + 1, self.other - 1)
        return next(number for number in near if self.compare(number, self.other) == self.check.wanted)


def find_comparison(frame: FrameType, stop: CodeType) -> Comparison | None:
    """What `float()` or `int()` of a tensor is compared with in `frame`; None where it is used otherwise."""
    source = source_of(frame.f_code.co_filename)
    node = None if source is None else asked(frame, source)
    parent = None if source is None or node is None else source.parents.get(node)
    if not isinstance(parent, ast.Compare) or len(parent.ops) > 1 or type(parent.ops[0]) not in COMPARED:
        return None
    if not isinstance(node, ast.Call) or name_of(node.func) not in ("int", "float"):
        return None
    check = _climb(frame, stop, parent)
    if check is None or (check.raises and _is_caught(frame, stop)):
        return None
    compare = COMPARED[type(parent.ops[0])]
    is_left = parent.left is node
    other = evaluate(parent.comparators[0] if is_left else parent.left, frame)
    if isinstance(other, bool) or not isinstance(other, int | float) or not math.isfinite(other):
        return None
    return Comparison(check=check, compare=compare if is_left else lambda a, b: compare(b, a), other=other)


def is_formatted(frame: FrameType) -> bool:
    """Whether a number that is asked for in `frame` becomes text (`"%.3f" % x`)."""
    source = source_of(frame.f_code.co_filename)
    node = None if source is None else asked(frame, source)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return False
    if isinstance(node.left, ast.Constant | ast.JoinedStr | ast.Name | ast.Attribute):
        return isinstance(evaluate(node.left, frame), str)
    return False


def is_violated(test: ast.expr, wanted: bool, frame: FrameType) -> Tensor | bool:
    """Whether a test has another value than is wanted, evaluated anew; a tensor where it follows from tensors."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_violated(test.operand, not wanted, frame)
    if isinstance(test, ast.BoolOp):
        return violated_of([(value, wanted) for value in test.values], isinstance(test.op, ast.And) != wanted, frame)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "bool" and test.args:
        return is_violated(test.args[0], wanted, frame)
    value = evaluate(test, frame)
    if isinstance(value, Tensor):
        return torch.logical_not(value) if wanted else value != 0
    return bool(value) != wanted


def violated_of(tests: Sequence[tuple[ast.expr, bool]], all_of_them: bool, frame: FrameType) -> Tensor | bool:
    """Whether all tests, or any, have other values than wanted; what Python would not evaluate is not."""
    found: Tensor | bool = all_of_them
    for test, wanted in tests:
        own = is_violated(test, wanted, frame)
        if not isinstance(own, Tensor):
            if own != all_of_them:
                return own
            continue
        if not isinstance(found, Tensor):
            found = own
        else:
            found = torch.logical_and(found, own) if all_of_them else torch.logical_or(found, own)
    return found


def _climb(frame: FrameType, stop: CodeType, tested: ast.expr | None = None) -> ValueCheck | None:
    """From the tested expression to the statement; through `return` to the caller."""
    asker: FrameType | None = frame
    flipped, others = False, list[tuple[ast.expr, bool]]()
    while asker is not None and asker.f_code is not stop:
        source = source_of(asker.f_code.co_filename)
        node = None if source is None else tested or asked(asker, source)
        if source is None or node is None:
            return None
        tested = None
        top = _top(node, source)
        parent = source.parents.get(top)
        if isinstance(parent, ast.Return):
            if any(isinstance(step, ast.BoolOp) for step in (*_path(node, top, source), top)):
                return None
            flipped ^= _is_flipped(node, top, source)
            asker = asker.f_back
            continue
        root = _root(top, source, asker)
        if root is None:
            return None
        wanted = root.wanted
        below = list(_path(node, top, source))
        child, wants = cast(ast.AST, top), wanted
        for step in reversed(below):
            if isinstance(child, ast.UnaryOp):
                wants = not wants
            elif isinstance(child, ast.BoolOp) and isinstance(child.op, ast.And) != wants:
                position = next(i for i, value in enumerate(child.values) if value is step)
                others += [(value, wants) for value in child.values[position + 1 :]]
            child = step
        return ValueCheck(
            wanted=wants != flipped,
            others=tuple(others),
            frame=asker,
            raises=root.raises,
            message=" ".join(root.complaint.split()),
        )
    return None


def _path(node: ast.AST, top: ast.AST, source: CodeSource) -> Iterator[ast.AST]:
    """`node` and what is around it, below `top`."""
    while node is not top:
        yield node
        node = source.parents[node]


def _top(node: ast.expr, source: CodeSource) -> ast.expr:
    """The largest expression whose truth follows from that of `node` and of tests beside it."""
    while True:
        parent = source.parents.get(node)
        is_not = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
        if is_not or isinstance(parent, ast.BoolOp) or _is_bool(parent, node):
            assert isinstance(parent, ast.expr)
            node = parent
        else:
            return node


def _compared(node: ast.expr, source: CodeSource) -> ast.expr:
    """The largest expression around a number that is made of arithmetic, comparisons and tests."""
    while isinstance(parent := source.parents.get(node), ast.Compare | ast.BinOp | ast.UnaryOp | ast.BoolOp):
        node = parent
    return node


def _is_bool(call: ast.AST | None, argument: ast.AST) -> bool:
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "bool"
        and call.args == [argument]
    )


def _is_flipped(node: ast.AST, top: ast.AST, source: CodeSource) -> bool:
    above = [source.parents[step] for step in _path(node, top, source)]
    return sum(isinstance(step, ast.UnaryOp) for step in above) % 2 == 1


def _root(top: ast.expr, source: CodeSource, frame: FrameType, is_number: bool = False) -> _Root | None:
    """What complains where the test `top` is not as wanted, None where anything else depends on it.

    is_number: a tensor stands for it, which may be compared before it is tested.
    """
    parent = source.parents.get(top)
    if isinstance(parent, ast.Assert) and parent.test is top:
        said = "" if parent.msg is None else f": {text_of(parent.msg)}"
        return _Root(True, parent, f"AssertionError{said or f': {ast.unparse(top)}'}", True)
    if isinstance(parent, ast.If) and parent.test is top:
        for branch, wanted in ((parent.body, False), (parent.orelse, True)):
            if branch and only_raises(branch):
                return _Root(wanted, parent, raised(branch), True)
        if only_tells(parent.body) and only_tells(parent.orelse):
            return _Root(False, parent, ast.unparse(parent.body[0]), False)
    if isinstance(parent, ast.Call) and parent.args and parent.args[0] is top and name_of(parent.func) in CHECKERS:
        said = f": {text_of(parent.args[1])}" if len(parent.args) > 1 else f": {ast.unparse(top)}"
        return _Root(True, parent, f"{name_of(parent.func)}{said}", True)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
        return _root_of_variable(parent, parent.targets[0].id, source, frame, is_number)
    return None


def _root_of_variable(
    assignment: ast.Assign, name: str, source: CodeSource, frame: FrameType, is_number: bool
) -> _Root | None:
    """The check that is the only reader of a variable, which is assigned once."""
    function = function_of(assignment, source)
    if function is None:
        return None
    inside = [node for statement in function.body for node in ast.walk(statement)]
    uses = [node for node in inside if isinstance(node, ast.Name) and node.id == name]
    stores = [node for node in uses if not isinstance(node.ctx, ast.Load)]
    loads = [node for node in uses if isinstance(node.ctx, ast.Load) and not _is_complaint(node, source)]
    if len(stores) != 1 or len(loads) != 1:
        return None
    if isinstance(source.parents.get(loads[0]), ast.Compare) and not is_number:
        return None
    top = _top(_compared(loads[0], source) if is_number else loads[0], source)
    if any(isinstance(step, ast.BoolOp) for step in (*_path(loads[0], top, source), top)):
        return None
    if isinstance(source.parents.get(top), ast.Assign):
        return None
    root = _root(top, source, frame)
    if root is None:
        return None
    return _Root(root.wanted != _is_flipped(loads[0], top, source), root.statement, root.complaint, root.raises)


def _is_complaint(node: ast.AST, source: CodeSource) -> bool:
    """Whether an expression is evaluated only where an error is raised."""
    child = node
    while (parent := source.parents.get(child)) is not None:
        if isinstance(parent, ast.Assert) and parent.msg is child:
            return True
        if isinstance(parent, ast.If) and any(child in b and only_raises(b) for b in (parent.body, parent.orelse)):
            return True
        child = parent
    return False


def _is_caught(frame: FrameType | None, stop: CodeType) -> bool:
    """Whether somebody between a frame and `stop` catches errors, so that raising one is a branch of the model.

    What torch catches while it traces, it would not catch in a call.
    """
    while frame is not None and frame.f_code is not stop:
        source = None if is_machinery(Path(frame.f_code.co_filename)) else source_of(frame.f_code.co_filename)
        if source is not None and any(first <= frame.f_lineno <= last for first, last in source.guarded):
            return True
        frame = frame.f_back
    return False
