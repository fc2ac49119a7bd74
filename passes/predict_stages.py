"""What will a rank of a pipeline send in a step? The collectives of its stages, and what goes to other stages.

send         each micro-batch forward, and the gradient of what a stage received back, to a stage on another rank
all_reduce   over axis `pipeline`: gradients of weights that stages on several ranks share, once a step
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from autopar.graph import CapturedModel, LocalModel, operands, requires_grad
from autopar.passes.predict import Sent, predicted_messages
from autopar.passes.split_stages import owners
from autopar.placement import local_ranges
from autopar.staged_plan import SPLITTING, StagedPlan

PIPELINE = "pipeline"
"""The axis across stages in what is counted."""


def predicted_rank_messages(
    stages: Sequence[CapturedModel], plan: StagedPlan, locals_: Mapping[int, LocalModel], place: int
) -> Sent:
    """What the rank at `place` of a stage mesh sends that runs the stages `locals_`, by number."""
    sent: Sent = {}

    def count(key: tuple[str, tuple[str, ...]], calls: int, nbytes: int) -> None:
        before = sent.get(key, (0, 0))
        sent[key] = (before[0] + calls, before[1] + nbytes)

    for number, local in locals_.items():
        for key, (calls, nbytes) in predicted_messages(local, splits=plan.schedule in SPLITTING).items():
            count(key, calls, nbytes)
        for nbytes in _sends(plan, local, number):
            count(("send", (PIPELINE,)), plan.microbatches, plan.microbatches * nbytes)
    for placeholder, sharing in owners(stages).items():
        mine = [number for number in sharing if number in locals_]
        spec = next(p for p in stages[sharing[0]].parameters if p.placeholder == placeholder)
        if mine and spec.trainable and len({plan.stage_rank(number) for number in sharing}) > 1:
            layout = plan.stages[mine[0]].layouts[placeholder]
            size = spec.storage.itemsize
            for _, length in local_ranges(spec.shape, layout, plan.mesh, plan.mesh.coordinate(place)):
                size *= length
            count(("all_reduce", (PIPELINE,)), 1, size)
    return sent


def _sends(plan: StagedPlan, local: LocalModel, number: int) -> Iterator[int]:
    """Bytes of each tensor that one micro-batch makes a stage send."""
    nodes = {node.name: node for node in local.graph.nodes}
    own = plan.stage_rank(number)
    if number + 1 < plan.num_stages and plan.stage_rank(number + 1) != own:
        output = next(node for node in reversed(local.graph.nodes) if node.op == "output")
        yield from (_nbytes(end) for end in operands(output)[: output.meta["ends"]])
    if number and plan.stage_rank(number - 1) != own:
        yield from (_nbytes(nodes[name]) for name in local.captured.received if requires_grad(nodes[name]))


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
