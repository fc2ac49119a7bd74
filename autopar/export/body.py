"""The lines of one function: graph nodes in order, each an assignment, or written into the one line that reads it.

A view or a collective on a value that nobody else reads keeps that value's name; a parameter's gathered copy is written
where it is used, so that it is freed after use.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.export.expressions import Label, Text, call_text, is_light, literal, short_name
from autopar.export.naming import PREFIX, SourceNames, in_words, last_component
from autopar.rules.registry import rule_of
from autopar.values.blocks import relative
from autopar.values.graph import operands

WIDTH = 116
INLINE = 72
INLINE_STATE = 100
SUFFIX = {"all_gather": "whole", "reduce_scatter": "part", "all_reduce": "sum", "local_slice": "part",
          "all_to_all": "exchanged", "all_reduce_gradient": "copy", "divide_gradient": "kept", "place_slice": "summand",
          "divide": "summand", "pad_dim": "padded"}  # fmt: skip


def is_collective(node: fx.Node) -> bool:
    return "step" in node.meta


class Body:
    """Writes nodes of one scope. `text` holds how each value is written by those who read it."""

    def __init__(
        self,
        names: SourceNames,
        known: Mapping[fx.Node, Text],
        block: str,
        kept: Sequence[fx.Node],
        state: frozenset[str],
        labels: Mapping[fx.Node, Text],
    ) -> None:
        self.names, self.block, self.state, self.labels = names, block, state, labels
        self.text: dict[fx.Node, Text] = dict(known)
        self.kept = frozenset(kept)
        self.lines: list[str] = []
        self.pending: list[fx.Node] = []
        self.module: str | None = None
        self.uses: Counter[fx.Node] = Counter()
        self.inside: frozenset[fx.Node] = frozenset()

    def begin(self, nodes: Sequence[fx.Node]) -> None:
        """Count readers among `nodes`, which `add` is then given in order."""
        self.inside = frozenset(nodes)
        for node in nodes:
            self.uses.update(operands(node))

    def add(self, node: fx.Node) -> None:
        if node.target is operator.getitem and operands(node)[0] in self.inside and node in self.text:
            return  # unpacked where the tuple was made
        made, read = self._made(node)
        inlined = self._is_inlined(node, made)
        # What is written inside another line must run where it would have run: autograd sums gradients in that order.
        while read != (self.pending[len(self.pending) - len(read) :] if inlined else self.pending):
            self._settle(self.pending[0])
            made, read = self._made(node)
        del self.pending[len(self.pending) - len(read) :]
        self.text[node] = made
        self.pending.append(node)
        if not inlined:
            self._settle(node)

    def settle(self) -> None:
        """Give every expression that is not yet part of a line its own."""
        while self.pending:
            self._settle(self.pending[0])

    def _settle(self, node: fx.Node) -> None:
        made = self.text[node]
        self.pending.remove(node)
        self._heading(node)
        if isinstance(node.meta.get("val"), tuple | list):
            self._unpack(node, made)
            return
        name = self._name(node)
        self.text[node] = Text(name)
        self._assign(name, made.source)

    def _made(self, node: fx.Node) -> tuple[Text, list[fx.Node]]:
        """The call, and which pending expressions it holds in the order of their evaluation."""
        read: list[fx.Node] = []
        write = self._write(node)

        def logged(value: Any) -> Text:
            if isinstance(value, fx.Node):
                if value in self.pending:
                    read.append(value)
            elif isinstance(value, list | tuple) and not isinstance(value, Label):
                fx.node.map_arg(value, lambda n: read.append(n) if n in self.pending else None)
            return write(value)

        return call_text(node, logged), read

    def _write(self, node: fx.Node) -> Callable[[Any], Text]:
        def write(value: Any) -> Text:
            if isinstance(value, fx.Node):
                return self.text[value]
            if isinstance(value, Label):
                return self.labels.get(node) or literal(value.number)
            if isinstance(value, tuple):
                inside = ", ".join(write(v).source for v in value)
                return Text(f"({inside},)" if len(value) == 1 else f"({inside})")
            if isinstance(value, list):
                return Text("[" + ", ".join(write(v).source for v in value) + "]")
            return literal(value)

        return write

    def _is_inlined(self, node: fx.Node, made: Text) -> bool:
        if self.uses[node] != 1 or node in self.kept or isinstance(node.meta.get("val"), tuple | list):
            return False
        if not any(user in self.inside for user in node.users):
            return False
        if is_collective(node) or self._root(node):
            return self._root(node) is not None and len(made.source) <= INLINE_STATE
        reader = next(user for user in node.users if user in self.inside)
        same = reader.meta.get("module") == node.meta.get("module") or _is_view(node)
        return is_light(node) and same and not is_collective(reader) and len(made.source) <= INLINE

    def _root(self, node: fx.Node) -> fx.Node | None:
        """The parameter or buffer that alone made this value: gathered, sliced, transposed."""
        while node.op == "call_function" and (is_collective(node) or _is_view(node) or short_name(node) == "pad_dim"):
            node = operands(node)[0]
        return node if node.op == "placeholder" and node.name in self.state else None

    def _name(self, node: fx.Node) -> str:
        root = self._root(node)
        source = next(iter(operands(node)), None)
        made_from = self.text[source].source if source in self.text else ""
        if made_from.isidentifier() and (root or is_collective(node) or _is_view(node)):
            own = source in self.inside or root is source
            if source is not None and own and self.uses[source] == 1 and source not in self.kept:
                return made_from
        if root is not None:
            name = self.text[root].source
            if name.isidentifier():
                return self.names.take(f"{name}_{SUFFIX.get(short_name(node), 'part')}")
            module, _, leaf = name.removeprefix('w["').removesuffix('"]').rpartition(".")
            return self.names.take(PREFIX.get(leaf, f"{leaf}_") + last_component(module))
        if made_from.isidentifier() and is_collective(node):
            return self.names.take(f"{made_from}_{SUFFIX[short_name(node)]}")
        module = relative(node.meta.get("module", ""), self.block)
        leaves = node in self.kept or any(user.meta.get("module") != node.meta.get("module") for user in node.users)
        if not module:
            return self.names.take("h" if leaves and self.block else short_name(node))
        return self.names.take(
            f"h_{last_component(module)}" if leaves else f"{last_component(module)}_{short_name(node)}"
        )

    def _heading(self, node: fx.Node) -> None:
        module = relative(node.meta.get("module", ""), self.block)
        if module != self.module and module:
            self.lines.append(f"# {in_words(module)}")
        self.module = module

    def _unpack(self, node: fx.Node, made: Text) -> None:
        picked = {user.args[1]: user for user in node.users if user.target is operator.getitem and user in self.inside}
        if len(picked) < len(node.users):  # read as a tuple too, or from outside
            name = self.names.take(short_name(node))
            self.text[node] = Text(name)
            self._assign(name, made.source)
            return
        targets = []
        for index in range(len(node.meta["val"])):
            user = picked.get(index)
            name = "_" if user is None else self._name(user)
            if user is not None:
                self.text[user] = Text(name)
            targets.append(name)
        self._assign(", ".join(targets) + ("," if len(targets) == 1 else ""), made.source)

    def _assign(self, target: str, source: str) -> None:
        self.lines.extend(assigned(target, source))


def assigned(target: str, source: str) -> list[str]:
    """An assignment, broken over lines where it is long."""
    line = f"{target} = {source}"
    if len(line) <= WIDTH - 8:
        return [line]
    if "," in target and len(target) > WIDTH // 2:
        *call, last = wrapped("", source)
        return ["(", *(f"    {name}," for name in split_arguments(target) if name), f"){call[0]}", *call[1:], last]
    return wrapped(target, source)


def returned(results: str) -> list[str]:
    """A return statement, one value a line where it is long."""
    if len(results) <= WIDTH - 16:
        return [f"return ({results})" if results.endswith(",") else f"return {results}"]
    return ["return (", *(f"    {value}," for value in split_arguments(results) if value), ")"]


def wrapped(target: str, source: str) -> list[str]:
    """A long call with its arguments on lines of their own."""
    plain = without_strings(source)
    if not source.endswith(")") or "(" not in plain:
        return [f"{target} = (", *(f"    {row}" for row in broken(source)), ")"]
    depth, start = 0, 0
    for start in range(len(plain) - 1, -1, -1):
        depth += (plain[start] in ")]") - (plain[start] in "([")
        if depth == 0:
            break
    arguments = split_arguments(source[start + 1 : -1])
    head = source[:start]
    if not is_dotted_name(head):
        return [f"{target} = (", *(f"    {row}" for row in broken(source)), ")"]
    inline = ", ".join(arguments)
    rows = [f"    {inline}"] if len(inline) <= WIDTH - 12 else [f"    {argument}," for argument in arguments]
    return [f"{target} = {head}(", *rows, ")"]


def is_dotted_name(head: str) -> bool:
    """Whether what stands before the last parenthesis is a plain name or attribute, so that a line may break there."""
    return head.replace(".", "_").isidentifier()


def broken(source: str) -> list[str]:
    """A long sum or product, one operand a line."""
    if len(source) <= WIDTH - 12:
        return [source]
    plain, depth, rows, start = without_strings(source), 0, [], 0
    for position, character in enumerate(plain):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and plain[position : position + 3] in (" + ", " - ", " * ", " / "):
            rows.append(source[start:position])
            start = position + 1
    return [*rows, source[start:]]


def without_strings(source: str) -> str:
    """The source, as long as it is, with what stands in quotes blotted out: brackets and commas there are none."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: "_" * len(found[0]), source)


def split_arguments(text: str) -> list[str]:
    """`f(x, 1), y` at its outer commas."""
    out, depth, start = [], 0, 0
    for position, character in enumerate(without_strings(text)):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            out.append(text[start:position].strip())
            start = position + 1
    return [*out, text[start:].strip()]


def _is_view(node: fx.Node) -> bool:
    """Shares its operand's storage: an op of the model whose rule says so."""
    origin = node.meta.get("origin")
    if node.op != "call_function" or is_collective(node) or origin is None or origin.op != "call_function":
        return False
    return node.target is operator.getitem or rule_of(origin).alias is not None
