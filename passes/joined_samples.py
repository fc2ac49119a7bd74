"""Whether the step of a batch is what its micro-batches make: of what sum over samples the loss is, or what joins them.

Two graphs of a model, of a whole batch and of fewer samples, are followed from the inputs to the loss (`sample_dims`).
The loss of a batch follows from those of its micro-batches if it is a sum or a mean of terms of single samples. A
buffer or a parameter that forward writes is written once a micro-batch, so that several are another program.
"""

from collections.abc import Mapping
from difflib import SequenceMatcher

from torch import fx

from autopar.passes.sample_dims import states_after
from autopar.passes.sample_states import Batch, Each, Fixed, Joined, State, Total, constant, name_of
from autopar.rules.registry import resolve
from autopar.values.graph import CapturedModel, operands, target_name


def loss_over_samples(whole: CapturedModel, part: CapturedModel) -> Total | Joined:
    """Of what sum over samples the loss is, or why micro-batches do not make it.

    whole: with the samples of a step, several. part: with fewer; with as many no number is known to be that of samples.
    """
    if (written := _written(whole)) is not None:
        return written
    sizes = [_samples(graph) for graph in (whole, part)]
    if sizes[0] < 2:
        return Joined(why="the inputs have no batch of several samples in their first dim")
    assert 0 < sizes[1] <= sizes[0], f"{sizes[1]} samples are no part of {sizes[0]}"
    batch = _batch(whole, part, *sizes) if sizes[1] < sizes[0] else Batch(size=sizes[0], few=sizes[0])
    loss = _states(whole, part, batch)[whole.nodes[whole.loss]][0]
    if isinstance(loss, Each):
        return Joined(why="the loss has a value for each sample")
    if isinstance(loss, Fixed):
        return Joined(why="the loss depends on how many samples there are") if loss.sized else Total(power=0)
    if isinstance(loss, Total) and loss.power not in (0, 1):
        return Joined(why=f"the loss grows with the batch to power {loss.power}")
    return loss


def _written(captured: CapturedModel) -> Joined | None:
    """What forward writes and the next forward reads."""
    for kind, specs in (("buffer", captured.buffers), ("parameter", captured.parameters)):
        for spec in specs:
            by = getattr(spec, "mutated_by", None)
            if by is not None:
                node = resolve(captured.nodes[by])[0]
                module = node.meta.get("module") or ""
                place = f"{name_of(node)}{f' in {module}' if module else ''}"
                return Joined(why=f"forward writes the {kind} {spec.names[0]} ({place}) once a batch")
    return None


def _samples(captured: CapturedModel) -> int:
    """In the batch: dim 0 of every input that has one; 0 if they differ."""
    sizes = {spec.shape[0] for spec in captured.inputs if spec.shape}
    return sizes.pop() if len(sizes) == 1 else 0


def _batch(whole: CapturedModel, part: CapturedModel, size: int, few: int) -> Batch:
    """The two graphs side by side: the same calls or, where those of few samples are fewer, the calls that both have.

    Of one sample a graph has no calls that repeat, and none that scale by the number of samples.
    """
    sides = [list(graph.graph.nodes) for graph in (whole, part)]
    calls = [[(node.op, target_name(node.target) * (node.op == "call_function")) for node in side] for side in sides]
    if calls[0] == calls[1]:
        twins = dict(zip(*sides, strict=True))
        if all([twins[n] for n in operands(a)] == list(operands(b)) for a, b in twins.items()):
            return Batch(size=size, few=few, twins=twins, is_exact=True)
    blocks = SequenceMatcher(a=calls[0], b=calls[1], autojunk=False).get_matching_blocks()
    twins = {sides[0][a + i]: sides[1][b + i] for a, b, length in blocks for i in range(length)}
    return Batch(size=size, few=few, twins=twins)


def _states(whole: CapturedModel, part: CapturedModel, batch: Batch) -> Mapping[fx.Node, tuple[State, ...]]:
    ranks = {spec.placeholder: len(spec.shape) for spec in whole.inputs}
    states: dict[fx.Node, tuple[State, ...]] = {}
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            states[node] = (_given(node, whole, part, batch, ranks.get(node.name, 0)),)
        elif node.op == "call_function":
            source, index = resolve(node)
            if source is not node:
                states[node] = (states[source][index],)
            else:
                states[node] = states_after(node, [states[n][0] for n in operands(node)], batch)
    return states


def _given(node: fx.Node, whole: CapturedModel, part: CapturedModel, batch: Batch, rank: int) -> State:
    """The state of a placeholder; rank: of an input, 0 for anything else."""
    if rank:
        return Each(dim=0)
    if node.name in whole.constants:
        own = [part.constants[batch.twins[node].name]] if batch.is_exact else list(part.constants.values())
        return constant(whole.constants[node.name], own, batch)
    return Fixed(varies=frozenset(range(node.meta["val"].dim())))
