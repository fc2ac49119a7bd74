"""Which buffers does a captured graph take for granted? Those that forward branched on: it holds while they do."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import PlanMismatchError
from autopar.values.schema import of_file


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferGuard:
    """The buffer `name` had the value of this hash when the model was captured."""

    name: str
    digest: str

    @classmethod
    def of(cls, name: str, value: Tensor) -> "BufferGuard":
        """A guard of the value that a buffer has."""
        return cls(name=name, digest=_digest(value))

    def check(self, value: Tensor) -> None:
        """Compare with a value that the buffer has now.

        Raises:
            PlanMismatchError: if it is another.
        """
        if not holds(self, value):
            raise PlanMismatchError(
                f"forward decides on buffer {self.name}, which has another value than when the model was captured, so "
                "that the plan's graph is of another branch; load the state first, and plan with the model that has it"
            )


def holds(guard: BufferGuard, value: Tensor) -> bool:
    """Whether a buffer has the value that a graph takes for granted."""
    return _digest(value) == guard.digest


def _digest(value: Tensor) -> str:
    plain = value.detach().cpu().contiguous()
    words = f"{plain.dtype} {tuple(plain.shape)}".encode()
    return hashlib.sha256(words + bytes(plain.reshape(-1).view(torch.uint8).numpy().data)).hexdigest()[:16]
