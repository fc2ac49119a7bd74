"""A local graph as Python that a person can read: one function a kind of block, and `forward`, which calls them.

What runs is exactly the graph: same calls, same arguments, same order. `forward(w, *inputs)` takes the rank's
parameters, buffers and constants by qualified name, the inputs as the plan lays them out, and returns
`(loss, *new values of mutated buffers)` and, of micro-batches, perhaps the count of labels. That of a pipeline's stage
takes what it receives as further inputs and returns, unless it is the last, what it sends in place of the loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.export.body import WIDTH, Body, assigned, returned
from autopar.export.expressions import Text
from autopar.export.naming import USED, SourceNames, identifier, in_words, parameter_names, quoted
from autopar.lower.regions import Region, Sections, sections, state_names
from autopar.ops.own_gradient import is_own
from autopar.values.blocks import title
from autopar.values.custom_ops import defining_module
from autopar.values.graph import operands
from autopar.values.local_model import LocalModel

INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """The source of a block's function, and how it is called."""

    name: str
    table: str
    lines: tuple[str, ...]
    num_labels: int


def generate(local: LocalModel) -> str:
    """The module's source.

    It imports torch and `autopar.runtime` alone.

    Raises:
        CaptureError: if the graph calls a backward of the user's own.
    """
    if own := [node.name for node in local.graph.nodes if is_own(node.target)]:
        raise CaptureError(
            f"{own[0]} runs the user's own backward (an autograd.Function, a hook, a written parameter), which has "
            "no Python source; run the plan with autopar.distribute"
        )
    found = sections(local)
    names = SourceNames(_own_functions(local))
    functions = {group[0].key: _function(group, names, _own_functions(local)) for group in found.classes}
    body = _forward(local, found, functions)
    code = [line for function in functions.values() for line in (*function.lines, "", "")] + body
    return "\n".join([*_header(local, code), "", "", *code, ""])


def _header(local: LocalModel, code: Sequence[str]) -> list[str]:
    plan, text = local.plan, "\n".join(code)
    uses_aten = "aten." in text
    libraries = sorted({module for node in local.graph.nodes if (module := _library(node)) is not None})
    imports = ["import torch"] if "torch." in text or uses_aten else []
    imports += ["from torch.nn import functional as F"] if "F." in text else []
    return [
        f'"""{in_words(plan.model)} on mesh {in_words(str(plan.mesh))}: what every rank runs.',
        "",
        "Written by autopar export; edit as you like. Shapes are those of one rank. `w` maps names of",
        "parameters, buffers and constants to this rank's tensors.",
        '"""',
        "",
        *imports,
        *([""] if imports else []),
        *_runtime_import(local, text),
        *(f"import {module}  # registers ops that the model calls" for module in libraries),
        *(["", "aten = torch.ops.aten"] if uses_aten else []),
    ]


def _library(node: fx.Node) -> str | None:
    """The module whose import registers the node's op, if a library beside torch did."""
    target = node.target
    return defining_module(target) if isinstance(target, torch._ops.OpOverload) else None


def _runtime_import(local: LocalModel, text: str) -> list[str]:
    """Our own functions, all from one place; no line where nothing of ours is called."""
    used = _own_functions(local) | ({"block"} if "**block(" in text else set())
    if not used:
        return []
    line = f"from autopar.runtime import {', '.join(sorted(used))}"
    if len(line) <= WIDTH:
        return [line]
    return ["from autopar.runtime import (", *(f"{INDENT}{name}," for name in sorted(used)), ")"]


def _own_functions(local: LocalModel) -> set[str]:
    """Names of autopar's functions that the graph calls."""
    calls = [node.target for node in local.graph.nodes if node.op == "call_function"]
    again = {"again"} if any(node.meta.get("again") for node in local.graph.nodes) else set()
    return again | {target.__name__ for target in calls if getattr(target, "__module__", "").startswith("autopar.")}


def _function(group: Sequence[Region], names: SourceNames, imported: set[str]) -> Function:
    """The function of regions that share one, written from the first."""
    region = group[0]
    heading = title(r.block for r in group)
    name = names.take(identifier("_".join(p for p in region.block.split(".") if not p.isdigit()).lower()))
    table = name.upper()
    scope = SourceNames([name, table, *imported])
    parameters = parameter_names(region.parameters.values(), scope)
    inputs = _input_names(group, scope)
    known = {node: Text(inputs[i]) for i, node in enumerate(region.inputs)}
    placeholders = {n: n for node in region.nodes for n in operands(node) if n.name in region.parameters}
    known |= {node: Text(parameters[region.parameters[node.name]]) for node in placeholders}
    labels = {node: Text(f"sites[{i}]") for i, node in enumerate(region.labels)}
    body = Body(scope, known, region.block, region.outputs, frozenset(region.parameters), labels)
    body.begin(region.nodes)
    for node in region.nodes:
        body.add(node)
    body.settle()
    own = [f"*, {', '.join(parameters.values())}"] if parameters else []
    arguments = [*inputs, *(["sites"] if region.labels else []), *own]
    results = ", ".join(body.text[node].source for node in region.outputs)
    count = f"{len(group)} calls" if len(group) > 1 else "1 call"
    lines = [
        *_signature(f"def {name}", arguments),
        f'{INDENT}"""{in_words(heading)}, {count}."""',
        *(INDENT + line for line in body.lines),
        *(INDENT + line for line in returned(results)),
    ]
    if parameters:
        rows = [f'{INDENT}"{argument}": {quoted(path)},' for path, argument in parameters.items()]
        lines = [f"{table} = {{", *rows, "}", "", "", *lines]
    return Function(name=name, table=table if parameters else "", lines=tuple(lines), num_labels=len(region.labels))


def _signature(head: str, arguments: Sequence[str]) -> list[str]:
    line = f"{head}({', '.join(arguments)}):"
    if len(line) <= WIDTH + 4:
        return [line]
    text = ", ".join(arguments)
    rows: list[str] = []
    for word in text.split(", "):
        if rows and len(rows[-1]) + len(word) + 2 <= WIDTH:
            rows[-1] += f" {word},"
        else:
            rows.append(f"{INDENT}{word},")
    return [f"{head}(", *rows, "):"]


def _input_names(group: Sequence[Region], scope: SourceNames) -> list[str]:
    """Inputs made by a block of the same kind are the running `hidden` state; others have their producer's name."""
    made_inside = {node for region in group for node in region.outputs}
    out = []
    for position, node in enumerate(group[0].inputs):
        sources = {region.inputs[position] for region in group}
        if len(sources) == 1:
            out.append(scope.take(_plain(node)))
        else:
            out.append(scope.take("hidden" if sources & made_inside else f"x_{_plain(node)}"))
    return out


def _plain(node: fx.Node) -> str:
    """A producer as an argument's name: its module, or its own name for an input."""
    if node.op == "placeholder":
        return node.name
    origin = node.meta.get("origin", node)
    return str(origin.name).replace("_default", "")


def _forward(local: LocalModel, found: Sections, functions: dict[str, Function]) -> list[str]:
    captured = local.captured
    placeholders = {node.name: node for node in local.graph.nodes if node.op == "placeholder"}
    inputs = [spec.placeholder for spec in captured.inputs]
    ours = {*_own_functions(local), *(f.name for f in functions.values()), *(f.table for f in functions.values())}
    taken = SourceNames([*inputs, *ours])
    # Inputs keep their names, builtins' too, unless the code has another use for one.
    called = {name: taken.take(name) if name in ours | USED else name for name in inputs}
    names = SourceNames([*inputs, *called.values(), *ours])
    known = {placeholders[name]: Text(called[name]) for name in inputs}
    for placeholder, known_as in state_names(local).items():
        known[placeholders[placeholder]] = Text(f"w[{quoted(known_as[0])}]")
    for name in captured.constants:
        known[placeholders[name]] = Text(f"w[{quoted(name)}]")
    output = next(node for node in local.graph.nodes if node.op == "output")
    crossing = [n for item in found.order if isinstance(item, Region) for n in item.inputs if n.op != "placeholder"]
    state = frozenset(n for n in placeholders if n not in inputs)
    body = Body(names, known, "", [*operands(output), *crossing], state, {})
    body.begin([item for item in found.order if isinstance(item, fx.Node)])
    position = 0
    while position < len(found.order):
        item = found.order[position]
        if isinstance(item, fx.Node):
            body.add(item)
            position += 1
        else:
            position += _call_blocks(found.order[position:], body, functions, operands(output))
    body.settle()
    results = [body.text[node].source for node in operands(output)]
    result = ", ".join(results) + ("," if len(results) == 1 else "")
    made = "The loss" if captured.loss else "What the next stage takes"
    return [
        *_signature("def forward", ["w", *called.values()]),
        f'{INDENT}"""{made}, and new values of buffers that change."""',
        *(INDENT + line for line in body.lines),
        *(INDENT + line for line in returned(result)),
    ]


def _call_blocks(
    order: Sequence[fx.Node | Region], body: Body, functions: dict[str, Function], results: Sequence[fx.Node]
) -> int:
    """Call the first region's function, or loop over a chain of alike regions; returns how many regions that took."""
    body.settle()
    chain = _chain(order, frozenset(results))
    first = chain[0]
    function = functions[first.key]
    for node in first.inputs:
        if not body.text[node].source.isidentifier() and node.op != "placeholder":
            raise AssertionError(f"{node.name} crosses into {first.block} without a name")
    arguments = [body.text[node].source for node in first.inputs]
    feeds = (
        {i: chain[1].inputs[i] for i in range(len(first.inputs)) if chain[1].inputs[i] is not first.inputs[i]}
        if (len(chain) > 1)
        else {}
    )
    outputs = []
    for node in first.outputs:
        back = next((i for i, fed in feeds.items() if fed is node), None)
        # The running state keeps one name through the loop.
        outputs.append("hidden" if len(chain) > 1 and back is not None else body.names.take(_output_name(node, first)))
    if len(chain) > 1:
        for i, fed in feeds.items():
            running = outputs[first.outputs.index(fed)]
            if list(feeds.values()).index(fed) == list(feeds).index(i) and arguments[i] != running:
                body.lines.append(f"{running} = {arguments[i]}")
            arguments[i] = running
        body.names.taken |= set(outputs)
    body.lines.extend(_call_lines(chain, function, arguments, outputs))
    for region in chain:
        for node, name in zip(region.outputs, outputs, strict=True):
            body.text[node] = Text(name)
    body.module = None
    return len(chain)


def _output_name(node: fx.Node, region: Region) -> str:
    leaf = region.block.split(".")
    return f"h_{leaf[-2]}_{leaf[-1]}" if len(leaf) > 1 else f"h_{leaf[0]}"


def _call_lines(chain: Sequence[Region], function: Function, arguments: list[str], outputs: list[str]) -> list[str]:
    target = ", ".join(outputs)
    if len(chain) == 1:
        sites = [f"sites={_tuple(chain[0].labels.values())}"] if function.num_labels else []
        own = [f"**block(w, {quoted(chain[0].block)}, {function.table})"] if function.table else []
        return assigned(target, f"{function.name}({', '.join([*arguments, *sites, *own])})")
    prefix, _, start = chain[0].block.rpartition(".")
    numbered = "f" + quoted(prefix.replace("{", "{{").replace("}", "}}") + ".\0").replace("\\x00", "{i}")
    own = [f"**block(w, {numbered}, {function.table})"] if function.table else []
    low, high = int(start), int(start) + len(chain)
    head = f"for i in range({low}, {high}):" if low else f"for i in range({high}):"
    sites = []
    if function.num_labels:
        listed = ", ".join(_tuple(region.labels.values()) for region in chain)
        head = f"for i, sites in enumerate([{listed}]{f', {low}' if low else ''}):"
        sites = ["sites=sites"]
    return [
        head,
        *(INDENT + line for line in assigned(target, f"{function.name}({', '.join([*arguments, *sites, *own])})")),
    ]


def _tuple(numbers: Iterable[int]) -> str:
    return str(tuple(numbers))


def _chain(order: Sequence[fx.Node | Region], results: frozenset[fx.Node]) -> list[Region]:
    """The longest run of regions that a loop can call: numbered in a row, each fed by the one before."""
    first = order[0]
    assert isinstance(first, Region)
    chain = [first]
    for item in order[1:]:
        before = chain[-1]
        if not isinstance(item, Region) or item.key != first.key or not _follows(before, item, chain, results):
            break
        chain.append(item)
    return chain


def _follows(before: Region, after: Region, chain: Sequence[Region], results: frozenset[fx.Node]) -> bool:
    prefix, _, number = before.block.rpartition(".")
    if after.block != f"{prefix}.{int(number) + 1}":
        return False
    feeds = []
    for i, node in enumerate(after.inputs):
        if node in before.outputs:
            feeds.append((i, before.outputs.index(node)))
        elif node is not before.inputs[i]:
            return False
    if not feeds or len({out for _, out in feeds}) != len(feeds):
        return False
    if len(chain) > 1 and feeds != _feeds(chain[-2], chain[-1]):
        return False
    # All that `before` hands out must end in `after`: later readers would see the name reassigned.
    inside = set(after.nodes)
    return all(user in inside for node in before.outputs for user in node.users) and not results & set(before.outputs)


def _feeds(before: Region, after: Region) -> list[tuple[int, int]]:
    return [(i, before.outputs.index(node)) for i, node in enumerate(after.inputs) if node in before.outputs]
