"""Who tells a rank when to run which pass? The schedules of `torch.distributed.pipelining`, by their public classes.

Everything that is particular to that library is here: how a stage is described to it (shapes of what goes in and out,
so that nothing is inferred by a trial run), and that a step's micro-batches are its argument `index` cut into single
numbers, by which stages find their own inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from autopar.errors import ArgumentError, AutoparError
from autopar.runtime.lost_ranks import BETWEEN_STAGES, among_ranks
from autopar.runtime.private_torch import RELEASE, greet_others
from autopar.runtime.stage import Stage, sent_dtype
from autopar.values.graph import CapturedModel, dtype_of, requires_grad, shape_of
from autopar.values.placement import local_shape
from autopar.values.plan import Plan
from autopar.values.schedules import SPLITTING

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}
SINGLE = ("gpipe", "1f1b")
"""Schedules of one stage a rank, which their classes take alone, not in a list."""


def schedule_class(schedule: str) -> Any:
    """The class of a schedule.

    Raises:
        ArgumentError: if the torch at hand has none.
    """
    found = getattr(pipelining, CLASSES[schedule], None)
    if found is None:
        there = ", ".join(name for name, own in CLASSES.items() if hasattr(pipelining, own))
        raise ArgumentError(
            f"schedule {schedule} needs torch.distributed.pipelining.{CLASSES[schedule]}, which torch "
            f"{torch.__version__} does not have; plan with one of {there}"
        )
    return found


class StageSchedule:
    """Runs steps over a rank's stages, together with the other ranks of its pipeline.

    captured: all stages of the model. loss_dtype: what the last one gives (torch 2.11 checks it).
    """

    def __init__(
        self,
        plan: Plan,
        captured: Sequence[CapturedModel],
        stages: Sequence[Stage],
        group: dist.ProcessGroup,
        loss_dtype: torch.dtype,
    ) -> None:
        self.plan, self.captured, self.stages, self.group = plan, captured, stages, group
        self.loss_dtype = loss_dtype
        self._check_received()
        described = self._described_stages = [self._described(stage) for stage in stages]
        self._schedule = schedule_class(plan.schedule)(
            described[0] if plan.schedule in SINGLE else described,
            plan.microbatches,
            loss_fn=lambda loss, index: loss,
            scale_grads=False,
        )

    def buffers(self) -> Iterator[Tensor]:
        """What the library receives into, or put there: of every micro-batch, forward and back."""
        for stage in self._described_stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                yield from (info.buffer for info in infos if info.buffer is not None)

    def train(self) -> None:
        """All passes of a step, forward and back."""
        index = torch.arange(self.plan.microbatches)
        with _explained():
            self._schedule.step(index=index, target=index, losses=[], return_outputs=False)

    def evaluate(self) -> None:
        """All passes forward, without gradients, in waves: stage s runs micro-batch i in wave s + i.

        Ours, since the library's evaluation stops at neighbouring stages on one rank.
        """
        waves = [
            (stage.number + i, stage.number, i, stage) for stage in self.stages for i in range(self.plan.microbatches)
        ]
        here: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sending: list[Any] = []
        for _, number, i, stage in sorted(waves, key=lambda wave: wave[:3]):
            received = here.pop((number, i), None)
            sent = stage(*(self._received(stage) if received is None else received), index=torch.tensor(i))
            if number + 1 == self.plan.num_stages:
                continue
            other = self.plan.stage_rank(number + 1)
            if other == self.plan.stage_rank(number):
                here[number + 1, i] = sent
            else:
                with _explained():
                    sending += [dist.isend(x, group=self.group, group_dst=other) for x in sent]
        with _explained():
            for work in sending:
                work.wait()

    def _received(self, stage: Stage) -> tuple[Tensor, ...]:
        """What the stage before sends from its rank; nothing for the first."""
        found = []
        for example in self._examples(stage.number):
            buffer = torch.empty(example.shape, dtype=example.dtype, device=stage.device)
            with _explained():
                dist.recv(buffer, group=self.group, group_src=self.plan.stage_rank(stage.number - 1))
            found.append(buffer)
        return tuple(found)

    def _check_received(self) -> None:
        """Raises ArgumentError, on every rank, if a stage receives what this torch cannot send."""
        if RELEASE >= (2, 13):
            return
        for number in range(1, self.plan.num_stages):
            received = zip(self.captured[number].received, self._examples(number), strict=True)
            if whole := [name for name, example in received if not example.is_floating_point()]:
                raise ArgumentError(
                    f"stage {number} receives {', '.join(whole)}: integers or bools, which have no gradient; pipelines "
                    f"of torch {torch.__version__} want one of all that a stage receives. Use torch 2.13, or plan with "
                    "--pipeline 1"
                )

    def _described(self, stage: Stage) -> pipelining.PipelineStage:
        is_last = stage.number + 1 == self.plan.num_stages
        loss = (torch.empty((), dtype=self.loss_dtype, device="meta"),)
        described = pipelining.PipelineStage(
            stage,
            stage.number,
            self.plan.num_stages,
            stage.device,
            input_args=self._examples(stage.number),
            output_args=loss if is_last else self._examples(stage.number + 1),
            group=self.group,
            dw_builder=stage.later if self.plan.schedule in SPLITTING else None,
        )
        greet_others(described)
        return described

    def _examples(self, number: int) -> tuple[Tensor, ...]:
        """Meta tensors like those that one rank of a stage receives."""
        captured, plan = self.captured[number], self.plan.stages[number]
        found = []
        for name in captured.received:
            node = captured.nodes[name]
            shape = local_shape(shape_of(node), plan.layouts[name], plan.mesh)
            found.append(torch.empty(shape, dtype=sent_dtype(dtype_of(node)), device="meta"))
            found[-1].requires_grad_(requires_grad(node))
        return tuple(found)


@contextmanager
def _explained() -> Iterator[None]:
    """What went wrong in a pass as itself, not as the library wraps it; what went wrong between ranks as RankError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AutoparError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        if error.__cause__ is not None:
            raise
        with among_ranks(BETWEEN_STAGES):
            raise
