"""How does a long graph fall into functions? One a kind of block, called once per block, and what is left between them.

A block's nodes become a function if no value leaves the block and comes back (then the order of calls would not exist).
Blocks whose calls are alike in all but parameter names share a function; so do numbers that only label a call site.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.values.blocks import block_of, choose_depth, relative
from autopar.values.graph import LABELS, operands, target_name
from autopar.values.local_model import LocalModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """The nodes of one block, in order. `parameters` maps placeholders to names relative to the block.

    inputs: values from outside, in order of first use; outputs: values read outside, in order of definition.
    """

    block: str
    nodes: tuple[fx.Node, ...]
    parameters: Mapping[str, str]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @cached_property
    def labels(self) -> dict[fx.Node, int]:
        """Values of label keywords by node, in order."""
        return {node: int(node.kwargs[k]) for node in self.nodes for k in LABELS if k in node.kwargs}  # type: ignore[arg-type]

    @cached_property
    def key(self) -> str:
        """Equal for regions that one function can serve."""
        names = {node: f"%{i}" for i, node in enumerate(self.nodes)}
        names |= {node: f"%in{i}" for i, node in enumerate(self.inputs)}

        def canonical(node: fx.Node) -> _Name:
            return _Name(names.get(node) or "%" + self.parameters[node.name])

        lines = []
        for node in self.nodes:
            kwargs = {k: v for k, v in node.kwargs.items() if k not in LABELS}
            arguments = fx.node.map_aggregate(
                (node.args, kwargs), lambda a: canonical(a) if isinstance(a, fx.Node) else a
            )
            again = "again " if node.meta.get("again") else ""
            module = relative(node.meta.get("module", ""), self.block)
            lines.append(f"{again}{target_name(node.target)} {arguments} {module}")
        return "\n".join([*lines, str([names[node] for node in self.outputs])])


class _Name(str):
    """Stands for a node in a printed argument."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sections:
    """The graph in an order that can run: single nodes and regions. `classes` are regions that share a function."""

    order: tuple[fx.Node | Region, ...]
    classes: tuple[tuple[Region, ...], ...]


def sections(local: LocalModel) -> Sections:
    """Split the graph of a local model."""
    depths = {depth: _regions(local, depth) for depth in (1, 2)}
    depth = choose_depth({d: {r.block: r.key for r in regions} for d, regions in depths.items()})
    dissolved: set[str] = set()
    while True:
        regions = [r for r in depths[depth] if r.block not in dissolved]
        order, stuck = _order(local, regions)
        if stuck is None:
            break
        dissolved.add(stuck)
    classes: dict[str, list[Region]] = {}
    for item in order:
        if isinstance(item, Region):
            classes.setdefault(item.key, []).append(item)
    return Sections(order=tuple(order), classes=tuple(map(tuple, classes.values())))


def _regions(local: LocalModel, depth: int) -> list[Region]:
    names = state_names(local)
    members: dict[str, list[fx.Node]] = {}
    for node, block in _owners(local.graph, names, depth).items():
        if block:
            members.setdefault(block, []).append(node)
    return [_region(block, nodes, names) for block, nodes in members.items()]


def _owners(graph: fx.Graph, names: Mapping[str, tuple[str, ...]], depth: int) -> dict[fx.Node, str]:
    """The block of every call; what only prepares a block's own parameter belongs to that block."""
    owners: dict[fx.Node, str] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        owners[node] = block_of(node.meta.get("module", ""), depth)
        users = {owners.get(user, "") for user in node.users}
        sources = operands(node)
        if not owners[node] and len(users) == 1 and sources and all(s.name in names for s in sources):
            owners[node] = users.pop()
    return dict(reversed(owners.items()))


def _region(block: str, nodes: list[fx.Node], names: Mapping[str, tuple[str, ...]]) -> Region:
    inside = set(nodes)
    parameters: dict[str, str] = {}
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for source in operands(node):
            own = [n for n in names.get(source.name, ()) if n.startswith(block + ".")]
            if own:
                parameters[source.name] = relative(own[0], block)
            elif source not in inside:
                inputs[source] = None
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return Region(block=block, nodes=tuple(nodes), parameters=parameters, inputs=tuple(inputs), outputs=outputs)


def state_names(local: LocalModel) -> dict[str, tuple[str, ...]]:
    names = {parameter.placeholder: parameter.names for parameter in local.captured.parameters}
    return names | {buffer.placeholder: buffer.names for buffer in local.captured.buffers}


def _order(local: LocalModel, regions: list[Region]) -> tuple[list[fx.Node | Region], str | None]:
    """Regions and single nodes so that all run after what they read, or the block that makes this impossible."""
    unit: dict[fx.Node, int] = {}
    items: dict[int, fx.Node | Region] = {}
    inside = {node: region for region in regions for node in region.nodes}
    first: dict[str, int] = {}
    for position, node in enumerate(n for n in local.graph.nodes if n.op == "call_function"):
        region = inside.get(node)
        number = position if region is None else first.setdefault(region.block, position)
        unit[node] = number
        items[number] = node if region is None else region
    needs: dict[int, set[int]] = {number: set() for number in items}
    serves: dict[int, set[int]] = {number: set() for number in items}
    for node, number in unit.items():
        for source in operands(node):
            if source in unit and unit[source] != number:
                needs[number].add(unit[source])
                serves[unit[source]].add(number)
    ready = [number for number, sources in needs.items() if not sources]
    heapq.heapify(ready)
    order: list[fx.Node | Region] = []
    done: set[int] = set()
    while ready:
        number = heapq.heappop(ready)
        done.add(number)
        order.append(items[number])
        for other in serves[number]:
            needs[other].discard(number)
            if not needs[other]:
                heapq.heappush(ready, other)
    stuck = [item.block for number, item in items.items() if number not in done and isinstance(item, Region)]
    assert stuck or len(done) == len(items), "a graph without regions has an order"
    return order, (stuck[0] if stuck else None)
