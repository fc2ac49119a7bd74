"""How does the graph of a few layers become that of all? The last traced unit is copied as often as it is left out.

In a copy, an operand from the unit itself is that of the copy; one from the unit before is that of the copy before; a
parameter or buffer of the unit's layers is that of the copy's layers; anything else is the same for all. What follows
the unit reads the last copy. The unit must be alike the unit before it, operand by operand, and nothing but the next
unit may read it; where that does not hold the graph is not expanded, and every layer is traced after all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.capture.import_program import by_identity, placeholder
from autopar.capture.repeats import Repeat
from autopar.passes.graph_tools import outputs, tidy, verify
from autopar.passes.normalize.random import number_sites
from autopar.values.graph import LABELS, CapturedModel, operands, target_name


class NotAlikeError(Exception):
    """The traced layers are no copies of one another in the graph; its text says where."""


def expand(captured: CapturedModel, repeats: Sequence[Repeat], model: nn.Module) -> CapturedModel:
    """The graph of the whole `model` from `captured`, the graph of its layers that `repeats` keep.

    Raises:
        NotAlikeError: if some traced layers are no copies of one another.
    """
    return _Expander(captured, repeats, model).run()


class _Unit:
    """The nodes of one repeat's last traced unit, and how those of the unit before correspond to them."""

    def __init__(self, captured: CapturedModel, repeat: Repeat, named: Mapping[str, str]) -> None:
        self.repeat = repeat
        self.named = named
        self.constants = captured.constants
        self.before: dict[fx.Node, fx.Node] = {}
        position_of = {node: self._position(node.meta["module"]) for node in captured.graph.nodes if _is_call(node)}
        unit = range(repeat.unit, repeat.unit + repeat.period)
        earlier = range(repeat.unit - repeat.period, repeat.unit)
        self.nodes = [node for node, position in position_of.items() if position in unit]
        previous = [node for node, position in position_of.items() if position in earlier]
        if len(self.nodes) != len(previous) or not self.nodes:
            raise NotAlikeError(f"{repeat.stack}: {len(previous)} and {len(self.nodes)} nodes in units that are alike")
        self.previous = dict(zip(previous, self.nodes, strict=True))
        self.own = set(self.nodes)
        for old, new in self.previous.items():
            self._compare(old, new)
        following = range(repeat.unit + repeat.period, repeat.unit + 2 * repeat.period)
        order = {node: i for i, node in enumerate(captured.graph.nodes)}
        self.last = max(self.nodes, key=lambda node: order[node])
        for node in self.nodes:
            for user in node.users:
                if user in self.own or user.op == "output":
                    continue
                if position_of[user] not in following or order[user] < order[self.last]:
                    raise NotAlikeError(f"{repeat.stack}: {user.name} reads {node.name} from outside")
        for node in previous:
            for user in node.users:
                if user not in self.own and user not in self.previous and user.op != "output":
                    raise NotAlikeError(f"{repeat.stack}: {user.name} reads {node.name} from outside")

    def _position(self, module: str) -> int:
        """Which kept layer a module is, or is part of; -1 for none."""
        path = self.repeat.stack + "."
        return int(module.removeprefix(path).split(".")[0]) if module.startswith(path) else -1

    def _compare(self, old: fx.Node, new: fx.Node) -> None:
        shapes = [str(_shapes(node.meta["val"])) for node in (old, new)]
        words = [target_name(node.target) + _constants(node) for node in (old, new)]
        if shapes[0] != shapes[1] or words[0] != words[1]:
            raise NotAlikeError(f"{self.repeat.stack}: {old.name} and {new.name} differ")
        for was, now in zip(operands(old), operands(new), strict=True):
            if now in self.own:
                alike = self.previous.get(was) is now
            elif now in self.previous:
                alike = was.op != "placeholder" and was not in self.own
            elif now.op == "placeholder" and self.role(now, 1) is not None:
                alike = self.role(now, -1) == self.named.get(was.name)
            else:
                alike = was is now or self._same_constant(was, now)
            if not alike:
                raise NotAlikeError(
                    f"{self.repeat.stack}: {old.name} reads {was.name} where {new.name} reads {now.name}"
                )

    def _same_constant(self, one: fx.Node, other: fx.Node) -> bool:
        values = [self.constants.get(node.name) for node in (one, other)]
        return values[0] is not None and values[1] is not None and torch.equal(values[0], values[1])

    def role(self, node: fx.Node, units: int) -> str | None:
        """The name of a parameter or buffer of this unit's layers, as it is `units` units further; None for others."""
        name = self.named.get(node.name, "")
        position = self._position(name)
        if not self.repeat.unit <= position < self.repeat.unit + self.repeat.period:
            return None
        rest = name.removeprefix(f"{self.repeat.stack}.{position}")
        return f"{self.repeat.stack}.{position + units * self.repeat.period}{rest}"


class _Expander:
    def __init__(self, captured: CapturedModel, repeats: Sequence[Repeat], model: nn.Module) -> None:
        self.captured, self.repeats, self.model = captured, repeats, model
        self.named = {spec.placeholder: spec.names[0] for spec in captured.parameters}
        self.named |= {spec.placeholder: spec.names[0] for spec in captured.buffers}
        self.units = [_Unit(captured, repeat, self.named) for repeat in repeats]
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.by_name: dict[str, fx.Node] = {}

    def run(self) -> CapturedModel:
        old = {node.name: node for node in self.captured.graph.nodes}
        taken: set[str] = set()
        parameters, buffers = [], []
        short = {name: spec for spec in self.captured.parameters for name in spec.names}
        for names, tensor in by_identity(self.model.named_parameters(remove_duplicate=False)):
            spec = short[self._kept_name(names[0])]
            node = placeholder(self.graph, taken, "p_" + names[0], tensor)
            node.meta |= {"requires_grad": old[spec.placeholder].meta["requires_grad"]}
            parameters.append(replace(spec, placeholder=node.name, names=names))
            self._bind(names, node)
        held = {name: spec for spec in self.captured.buffers for name in spec.names}
        mutated: dict[str, tuple[str, int]] = {}
        for names, tensor in by_identity(self.model.named_buffers(remove_duplicate=False)):
            kept = held[self._kept_name(names[0])]
            node = placeholder(self.graph, taken, "b_" + names[0], tensor)
            if kept.mutated_by is not None:
                mutated[node.name] = kept.mutated_by, self._copy_number(names[0])
            buffers.append(replace(kept, placeholder=node.name, names=names))
            self._bind(names, node)
        for source in self.captured.graph.nodes:
            if source.op == "placeholder" and source.name not in self.named:
                self.env[source] = self.graph.node_copy(source)
                self.env[source].meta = dict(source.meta)
            elif source.op == "placeholder":
                self.env[source] = self.by_name[self._real(self.named[source.name])]
        copies: dict[tuple[str, int], fx.Node] = {}
        last = {unit.last: unit for unit in self.units}
        for source in self.captured.graph.nodes:
            if not _is_call(source):
                continue
            self.env[source] = copies[source.name, 0] = self._copy(source, self.env)
            if source in last:
                self._repeat(last[source], copies)
        new_buffers = [
            replace(spec, mutated_by=copies[mutated[spec.placeholder]].name) if spec.placeholder in mutated else spec
            for spec in buffers
        ]
        loss = self.env[old[self.captured.loss]]
        assert outputs(self.captured.graph)[0] is old[self.captured.loss]
        self.graph.output((loss, *(copies[mutated[s.placeholder]] for s in new_buffers if s.placeholder in mutated)))
        whole = tidy(
            replace(
                self.captured,
                graph=self.graph,
                parameters=tuple(parameters),
                buffers=tuple(new_buffers),
                loss=loss.name,
            )
        )
        whole = number_sites(whole)
        verify(whole)
        return whole

    def _repeat(self, unit: _Unit, copies: dict[tuple[str, int], fx.Node]) -> None:
        """Copy after copy of a unit, each fed by the one before; what comes later reads the last."""
        current = {node: self.env[node] for node in unit.nodes}
        for number in range(1, unit.repeat.copies + 1):
            env = dict(self.env)
            for old, new in unit.previous.items():
                env[old] = current[new]
            for node in unit.nodes:
                for operand in operands(node):
                    if operand.op == "placeholder" and unit.role(operand, 0) is not None:
                        env[operand] = self.by_name[self._real(self.named[operand.name], number)]
            fresh: dict[fx.Node, fx.Node] = {}
            for node in unit.nodes:
                fresh[node] = env[node] = copies[node.name, number] = self._copy(node, env, number)
            current = fresh
        self.env.update(current)

    def _copy(self, node: fx.Node, env: Mapping[fx.Node, fx.Node], number: int = 0) -> fx.Node:
        new = self.graph.node_copy(node, lambda n: env[n])
        new.meta = {**node.meta, "module": self._real(node.meta["module"], number)}
        return new

    def _bind(self, names: tuple[str, ...], node: fx.Node) -> None:
        self.by_name.update(dict.fromkeys(names, node))

    def _real(self, path: str, copy: int = 0) -> str:
        """A path of the kept layers as one of the whole model, in the unit's copy'th copy."""
        for repeat in self.repeats:
            if path.startswith(repeat.stack + "."):
                position, *rest = path.removeprefix(repeat.stack + ".").split(".")
                return ".".join([repeat.stack, str(repeat.real(int(position), copy)), *rest])
        return path

    def _kept_name(self, path: str) -> str:
        """Where the parameter of that name in the whole model, or the one that it is a copy of, is among few layers."""
        for repeat in self.repeats:
            if path.startswith(repeat.stack + "."):
                layer, *rest = path.removeprefix(repeat.stack + ".").split(".")
                return ".".join([repeat.stack, str(repeat.position(int(layer))[0]), *rest])
        return path

    def _copy_number(self, path: str) -> int:
        for repeat in self.repeats:
            if path.startswith(repeat.stack + "."):
                return repeat.position(int(path.removeprefix(repeat.stack + ".").split(".")[0]))[1]
        return 0


def _is_call(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return [_shapes(part) for part in value]


def _constants(node: fx.Node) -> str:
    kwargs = {k: v for k, v in node.kwargs.items() if k not in LABELS}
    return str(fx.node.map_arg((node.args, kwargs), lambda _: "tensor"))
