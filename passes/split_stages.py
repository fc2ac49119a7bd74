"""Where is a model cut into the stages of a pipeline? Captured graph + cuts -> one captured graph a stage.

Stage k has the calls from `cuts[k - 1]` up to `cuts[k]` in the order of the graph, and of the placeholders those that
its calls read: a parameter that several stages read is in each of them. What is computed from inputs, constants and
fixed buffers alone (masks, positions, rotary tables) is no stage's: each computes what it needs of it again. Every
other value that a later stage reads is sent from stage to stage until the last that reads it, so that neighbours alone
talk. A buffer with a new value every step belongs to one stage.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.errors import PlanMismatchError
from autopar.passes.graph_tools import verify
from autopar.passes.lay_out import lay_out_received
from autopar.values.graph import (
    BufferSpec,
    CapturedModel,
    InputSpec,
    ParameterSpec,
    is_random,
    operands,
    requires_grad,
)
from autopar.values.plan import check_cuts


def split_stages(captured: CapturedModel, cuts: tuple[str, ...]) -> tuple[CapturedModel, ...]:
    """The stages of `captured`, in order; `cuts` are the names of the first calls of all stages but the first.

    Raises:
        PlanMismatchError: if the cuts are not calls of the model in their order, one lies after the loss, or a buffer
            is read in another stage than the one that writes it.
    """
    if captured.loss:
        check_cuts(captured, cuts)
    is_whole = captured.loss and not cuts  # a call leaves out what it does not read, which its stage may lack
    return (captured,) if is_whole else _Split(captured, cuts).run()


def possible_cuts(captured: CapturedModel, names: Iterable[str]) -> tuple[str, ...]:
    """Of these calls before the loss those with which a stage may begin: where no buffer that forward writes is read
    both before and after; none where forward writes parameters."""
    if not captured.written:
        return tuple(names)
    if any(p.mutated_by for p in captured.parameters):
        return ()
    nodes, order = captured.nodes, {node: at for at, node in enumerate(captured.graph.nodes)}
    spans = []
    for buffer in captured.buffers:
        if buffer.mutated_by is not None:
            made = nodes[buffer.mutated_by]
            made = operands(made)[0] if made.target is operator.getitem else made
            reading = [order[user] for user in (*nodes[buffer.placeholder].users, made) if user.op == "call_function"]
            spans.append((min(reading, default=0), max(reading, default=0)))
    return tuple(name for name in names if not any(a < order[nodes[name]] <= b for a, b in spans))


def cuts_by_state(captured: CapturedModel, stages_of: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Where another call of a model is cut so that every stage reads what it has: the first call of each stage that
    reads any, by number; of the first there is none.

    stages_of: the stages that have each parameter, and each buffer that a step writes, by its first name.

    Raises:
        PlanMismatchError: if it reads something of a stage after what later stages alone have.
    """
    specs: list[ParameterSpec | BufferSpec] = [*captured.parameters, *captured.buffers]
    names = {spec.placeholder: spec.names[0] for spec in specs if spec.names[0] in stages_of}
    cuts: dict[int, str] = {}
    current = 0
    for node in captured.graph.nodes:
        wanted = [stages_of[names[s.name]] for s in operands(node) if s.name in names and node.op == "call_function"]
        possible = set.intersection(*map(set, wanted)) if wanted else {current}
        later = [stage for stage in possible if stage >= current]
        if not later:
            read = ", ".join(names[s.name] for s in operands(node) if s.name in names)
            raise PlanMismatchError(
                f"this call of {captured.name} reads {read} after what stage {current} has alone, so that stages "
                "cannot run it in turn; plan without pipeline stages"
            )
        if min(later) > current:
            current = min(later)
            cuts[current] = node.name
    return cuts


def owners(stages: Sequence[CapturedModel]) -> dict[str, tuple[int, ...]]:
    """The stages that have each parameter, by placeholder."""
    found: dict[str, tuple[int, ...]] = {}
    for number, stage in enumerate(stages):
        for spec in stage.parameters:
            found[spec.placeholder] = (*found.get(spec.placeholder, ()), number)
    return found


class _Split:
    """`stage[node]` of each call that one stage makes; `anywhere`: placeholders and calls that any stage may have."""

    def __init__(self, captured: CapturedModel, cuts: tuple[str, ...]) -> None:
        self.captured, self.num_stages = captured, len(cuts) + 1
        self.written = {b.placeholder: captured.nodes[b.mutated_by] for b in captured.buffers if b.mutated_by}
        bound = {p.placeholder for p in captured.parameters} | set(self.written)
        self.anywhere: set[fx.Node] = set()
        self.stage: dict[fx.Node, int] = {}
        current = 0
        for node in captured.graph.nodes:
            current += node.name in cuts
            sources = operands(node)
            if node.op == "placeholder" and node.name not in bound:
                self.anywhere.add(node)
            elif node.op == "call_function":
                drawn = is_random(node)  # by another shard in another stage, so it is drawn in one and sent on
                if not drawn and not requires_grad(node) and all(source in self.anywhere for source in sources):
                    self.anywhere.add(node)
                else:
                    self.stage[node] = self.stage[sources[0]] if node.target is operator.getitem else current
        self.last_read = dict(self.stage)
        for node, number in self.stage.items():
            for source in operands(node):
                if source in self.last_read:
                    self.last_read[source] = max(self.last_read[source], number)

    def run(self) -> tuple[CapturedModel, ...]:
        loss = self.captured.loss
        if written := [p.names[0] for p in self.captured.parameters if p.mutated_by]:
            raise PlanMismatchError(
                f"forward of {self.captured.name} writes the parameter {written[0]}, which stages do not do; plan "
                "without pipeline stages"
            )
        if loss and (found := self.stage.get(self.captured.nodes[loss], 0)) != self.num_stages - 1:
            raise PlanMismatchError(
                f"the loss {loss} of {self.captured.name} is made in stage {found} of {self.num_stages}; "
                "give cuts before it"
            )
        return tuple(self._stage(number) for number in range(self.num_stages))

    def _crossing(self, number: int) -> tuple[str, ...]:
        """What stage `number` sends to the next, in the order of the graph; nothing before the first."""
        return tuple(n.name for n, made in self.stage.items() if made <= number < self.last_read[n])

    def _stage(self, number: int) -> CapturedModel:
        captured, is_last = self.captured, number == self.num_stages - 1
        accumulation = captured.accumulation
        if accumulation is not None and not is_last:
            accumulation = replace(accumulation, count=None)
        buffers = tuple(
            b if self._writes(number, b.placeholder) else replace(b, mutated_by=None) for b in captured.buffers
        )
        whole = replace(
            captured,
            name=f"{captured.name}, stage {number} of {self.num_stages}",
            buffers=buffers,
            loss=captured.loss if is_last else "",
            outputs=tuple(name for name in captured.outputs if self._makes(name) == number),
            accumulation=accumulation,
            received=self._crossing(number - 1),
            sends=self._crossing(number),
        )
        needed = self._needed(number, whole)
        self._check_buffers(number, needed)
        specs = replace(
            whole,
            parameters=tuple(p for p in whole.parameters if p.placeholder in needed),
            buffers=tuple(b for b in whole.buffers if b.placeholder in needed),
            constants={name: value for name, value in whole.constants.items() if name in needed},
            inputs=(
                *(i for i in whole.inputs if i.placeholder in needed),
                *(_received(captured.nodes[name]) for name in whole.received),
            ),
        )
        stage = replace(specs, graph=self._graph(specs, needed))
        verify(stage)
        return stage

    def _makes(self, name: str) -> int:
        """The stage that makes a value, for what any may have the last."""
        return self.stage.get(self.captured.nodes[name], self.num_stages - 1)

    def _writes(self, number: int, buffer: str) -> bool:
        return buffer in self.written and self.stage.get(self.written[buffer]) == number

    def _needed(self, number: int, stage: CapturedModel) -> set[str]:
        """Placeholders and calls of a stage, what it receives left out; the first has what none reads."""
        needed = self._unread() if number == 0 and self.captured.loss else set[str]()
        results = [*stage.ends, *stage.results]
        waiting = [node for node, own in self.stage.items() if own == number]
        waiting += [self.captured.nodes[name] for name in results if name not in stage.received]
        while waiting:
            node = waiting.pop()
            if node.name not in needed and node.name not in stage.received:
                needed.add(node.name)
                waiting += operands(node)
        return needed

    def _unread(self) -> set[str]:
        names = [p.placeholder for p in self.captured.parameters] + [b.placeholder for b in self.captured.buffers]
        names += [i.placeholder for i in self.captured.inputs]
        return {name for name in names if not self.captured.nodes[name].users}

    def _check_buffers(self, number: int, needed: set[str]) -> None:
        for buffer in self.captured.buffers:
            writer = self.written.get(buffer.placeholder)
            if writer is not None and buffer.placeholder in needed and self.stage[writer] != number:
                raise PlanMismatchError(
                    f"buffer {buffer.names[0]} of {self.captured.name} is read in stage {number} and written in stage "
                    f"{self.stage[writer]}, so one stage would have an old value; cut elsewhere"
                )

    def _graph(self, stage: CapturedModel, needed: set[str]) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.captured.graph.nodes:
            if node.op == "placeholder" and node.name in needed:
                env[node] = graph.node_copy(node)
        for name in stage.received:
            node = self.captured.nodes[name]
            env[node] = graph.placeholder(name)
            env[node].meta = {**node.meta, "module": ""}
        for node in self.captured.graph.nodes:
            if node.op == "call_function" and node.name in needed:
                env[node] = graph.node_copy(node, env.__getitem__)
        results = [env[self.captured.nodes[name]] for name in (*stage.ends, *stage.results)]
        lay_out_received(graph, stage.received)
        output = graph.output(tuple(results))
        output.meta = {"val": tuple(n.meta["val"] for n in results), "requires_grad": True, "module": ""}
        return graph


def _received(node: fx.Node) -> InputSpec:
    value = node.meta["val"]
    return InputSpec(placeholder=node.name, path=node.name, shape=tuple(value.shape), dtype=value.dtype)
