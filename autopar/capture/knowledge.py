"""What is known while a model is traced: values, what they depend on, and conditions that stay in the trace."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from autopar.capture.branches import Branches
from autopar.capture.checks import ValueCheck
from autopar.capture.known_values import KnownValues
from autopar.capture.real_values import real_values
from autopar.capture.shadows import Shadows
from autopar.capture.user_frame import asker, place_of
from autopar.errors import AutoparError
from autopar.ops.checked import ERROR, WARNING


class Knowledge:
    """What answers are made of, for one trace of a model.

    buffers: the model's own, by name. guards: of those whose values answers depend on, where the first was asked for.
    refused: the first question that had no answer, whatever the model made of the error. unsized: where the first
    tensor was made of whose size only the data knows. shadows, branches: what all traces of the model found. changing:
    buffers that the step changes, of whose values no numbers are made.
    """

    def __init__(
        self, buffers: Mapping[str, Tensor], shadows: Shadows, branches: Branches, changing: AbstractSet[str]
    ) -> None:
        super().__init__()
        self.known = KnownValues(buffers)
        self.shadows, self.branches, self.changing = shadows, branches, changing
        self.guards: dict[str, str] = {}
        self.refused: AutoparError | None = None
        self.unsized = ""
        self.stop: CodeType | None = None

    def value(self, tensor: Any) -> Tensor | None:
        """What a tensor holds, which an answer will depend on."""
        found = self.known.value(tensor) if isinstance(tensor, Tensor) else None
        if found is None:
            return None
        value, sources = found
        self.guard(sources)
        return value

    def guard(self, sources: Iterable[str]) -> None:
        """Note that an answer depends on buffers."""
        for name in sources:
            if name not in self.guards:
                self.guards[name], _ = place_of(asker())

    def constant(self, value: Tensor) -> Tensor:
        """A value of our own as one of the trace."""
        with real_values():
            kept = value.clone()  # the trace holds the other, which a write in place must not reach
        made = value.clone()
        self.known.set(made, kept, frozenset())
        return made

    def keep(self, holds: Tensor, check: ValueCheck) -> None:
        """Leave a condition in the trace."""
        kind = ERROR if check.raises else WARNING
        place, _ = place_of(check.frame)
        torch.ops.aten._assert_async.msg(holds.detach().reshape(()), f"{kind}{place}: {check.message}")
