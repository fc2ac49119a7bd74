"""How do stages run a call that is not a planned step? In turn, on the whole batch, without gradients.

Each stage sends the next what it needs. What the model returns goes from the stage that makes it to the ranks at the
same place of all others, so that every rank returns it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ops.random import Draws
from autopar.runtime.lost_ranks import BETWEEN_STAGES, among_ranks
from autopar.runtime.stage import sent_dtype
from autopar.runtime.state import State
from autopar.runtime.variant import Part, ends_of, given_back
from autopar.values.graph import CapturedModel
from autopar.values.local_model import LocalModel
from autopar.values.outputs import Returned
from autopar.values.placement import local_shape
from autopar.values.plan import Plan


class StagedVariant:
    """A call of a module with stages.

    stages: the graph of each stage that has one, with its number, in the order of the model. parts: those that this
    rank runs, by number. captured: the whole call.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[tuple[int, LocalModel]],
        parts: Mapping[int, Part],
        state: State,
        group: dist.ProcessGroup,
        captured: CapturedModel,
        returned: Returned,
    ) -> None:
        self.plan, self.stages, self.parts, self.state, self.group = plan, stages, parts, state, group
        self.inputs, self.outputs, self.returned = captured.inputs, captured.outputs, returned

    def run(self, inputs: Mapping[str, Tensor], draws: Draws, outputs: str, *, is_local: bool) -> Any:
        """What the model returns for inputs by placeholder, on every rank."""
        sent: dict[str, Tensor] = {}
        made: dict[str, Tensor] = {}
        for place, (number, local) in enumerate(self.stages):
            captured, here = local.captured, number in self.parts
            if here:
                if place and self.stages[place - 1][0] not in self.parts:
                    sent = self._receive(local, self.stages[place - 1][0])
                results = self.parts[number].run(inputs, sent, draws, is_local=is_local)
                sent = dict(zip(captured.sends, results, strict=False))
                made |= dict(zip(captured.outputs, results[len(captured.sends) :], strict=True))
                if place + 1 < len(self.stages) and self.stages[place + 1][0] not in self.parts:
                    self._send(sent.values(), self.stages[place + 1][0])
        return self.returned.holding(self._everywhere(made, outputs))

    def _send(self, values: Any, number: int) -> None:
        for value in values:
            plain = value.detach().contiguous()
            with among_ranks(BETWEEN_STAGES):
                dist.send(plain.view(sent_dtype(plain.dtype)), group=self.group, group_dst=self.plan.stage_rank(number))

    def _receive(self, local: LocalModel, number: int) -> dict[str, Tensor]:
        captured, plan, found = local.captured, local.plan, {}
        for name in captured.received:
            value = captured.nodes[name].meta["val"]
            shape = local_shape(tuple(value.shape), plan.layouts[name], plan.mesh)
            found[name] = self._buffer(shape, value.dtype)
            wire = found[name].view(sent_dtype(value.dtype))
            with among_ranks(BETWEEN_STAGES):
                dist.recv(wire, group=self.group, group_src=self.plan.stage_rank(number))
        return found

    def _everywhere(self, made: Mapping[str, Tensor], outputs: str) -> list[Tensor]:
        """What the call returns, in order, from the stages that make it."""
        found: dict[str, Tensor] = {}
        for number, local in self.stages:
            ends = ends_of(local)[len(local.captured.sends) :]
            for name, end in zip(local.captured.outputs, ends, strict=True):
                layout, shape, dtype = end
                value = made.get(name)
                if value is None:
                    value = self._buffer(local_shape(shape, layout, local.plan.mesh), dtype)
                value = value.detach().contiguous()
                wire = value.view(sent_dtype(dtype))
                with among_ranks("telling all stages what the call returns"):
                    dist.broadcast(wire, group=self.group, group_src=self.plan.stage_rank(number))
                found[name] = given_back(value, end, self.state, outputs)
        return [found[name] for name in self.outputs]

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.state.device)
