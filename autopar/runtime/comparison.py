"""Do ranks train on the same? Batches, optimizers and parameters that must be equal are compared now and then.

A rank with other data, another learning rate or other values trains something else without a word: collectives do not
mind. What is compared are digests, of a sample of each tensor, in training steps 1, 10, 100, ... (parameters in the
first alone), and everything every so many steps if asked. Ranks that must agree on a value are those that have it
whole, or the same part of it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.runtime.agreement import agree
from autopar.runtime.optimizers import stepped
from autopar.runtime.private_torch import local_tensor
from autopar.runtime.state import State
from autopar.values.graph import InputSpec
from autopar.values.placement import Shard

NUM_OF_INPUT, NUM_OF_PARAMETER = 2**16, 2**8
"""How many elements of a tensor are looked at, evenly apart: other batches differ in nearly all of them."""


def checked_interval(num_steps: int | None) -> int | None:
    """Raises ArgumentError if ranks cannot be compared every so many steps."""
    if num_steps is not None and num_steps < 1:
        raise ArgumentError(
            f"compare_every is a number of steps, at least 1, not {num_steps}; leave it out for 1, 10, 100"
        )
    return num_steps


class RankComparison:
    """Counts a module's training steps, of which some are compared: 1, 10, 100, ..., and `every` so many."""

    def __init__(self) -> None:
        self.every: int | None = None
        self.num_steps = 0

    def count(self) -> "Due | None":
        """Count a training step; what is compared in it, None for nothing. All ranks count alike."""
        self.num_steps += 1
        asked = self.every is not None and self.num_steps % self.every == 0
        if str(self.num_steps).strip("0") != "1" and not asked:
            return None
        return Due(parameters=asked or self.num_steps == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A comparison. parameters: their values too."""

    parameters: bool

    def compare(
        self,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[InputSpec],
        states: Sequence[State],
        *,
        is_local: bool,
        pipeline_rank: int,
    ) -> None:
        """Return if ranks train on the same; they call this together.

        tensors: of the call, by path. inputs: of the model. is_local: tensors are this rank's slices.

        Raises:
            RankError: on every rank, if something differs.
        """
        facts = {"inputs": "a rank's own rows" if is_local else "the global batch"}
        shared = optimizer_facts(states, pipeline_rank)
        if is_local:
            shared |= slice_facts(tensors, inputs, states[0])
        else:
            what = "values of inputs (a rank's own rows are given as autopar.LocalBatch)"
            facts[what] = digest(tensors.items(), NUM_OF_INPUT)
        if self.parameters:
            shared |= parameter_facts(states, pipeline_rank)
        agree(facts, shared, same="batch, optimizer and values")


def slice_facts(tensors: Mapping[str, Tensor], inputs: Sequence[InputSpec], state: State) -> dict[str, str]:
    """Digests of inputs by the part of the batch that a rank gives."""
    parts = {
        f"{spec.path} of ranks at {_part(state, spec.placeholder)}": spec.path
        for spec in inputs
        if spec.path in tensors
    }
    return {f"values of input {key}": digest([(path, tensors[path])], NUM_OF_INPUT) for key, path in parts.items()}


def optimizer_facts(states: Sequence[State], pipeline_rank: int) -> dict[str, str]:
    """The optimizers that have made a step with parameters of a module, of ranks that train any."""
    named = {id(p): state.specs[n].names[0] for state in states for n, p in state.parameters.items() if p.requires_grad}
    if not named:
        return {}
    own = [o for o in stepped if any(id(p) in named for group in o.param_groups for p in group["params"])]
    groups = []
    for group in (group for optimizer in own for group in optimizer.param_groups):
        names = sorted(named[id(p)] for p in group["params"] if id(p) in named)
        groups.append(f"{_options(group)} for {names}")
    rates = sorted({f"{float(group.get('lr', 0)):.6g}" for optimizer in own for group in optimizer.param_groups})
    return {
        "optimizer": "; ".join(sorted(f"{type(o).__name__}({_options(o.defaults)})" for o in own)) or "none so far",
        f"parameter groups of pipeline rank {pipeline_rank}": f"lr {', '.join(rates[:4])} ({_hash(sorted(groups))})",
    }


def parameter_facts(states: Sequence[State], pipeline_rank: int) -> dict[str, str]:
    """Digests of parameters by the part of them that a rank has."""
    held: dict[str, list[tuple[str, Tensor]]] = {}
    for state in states:
        for placeholder, parameter in state.parameters.items():
            key = f"values of parameters of pipeline rank {pipeline_rank} ({_part(state, placeholder)})"
            held.setdefault(key, []).append((state.specs[placeholder].names[0], local_tensor(parameter.detach())))
    return {key: digest(values, NUM_OF_PARAMETER) for key, values in held.items()}


def _part(state: State, placeholder: str) -> str:
    """Which part of a tensor a rank has: its place on the axes that split it."""
    axes = zip(state.mesh.names, state.layout(placeholder).axes, state.coordinate, strict=True)
    return ", ".join(f"{name} {place}" for name, placement, place in axes if isinstance(placement, Shard)) or "whole"


def digest(values: Iterable[tuple[str, Tensor]], count: int) -> str:
    """Of so many elements of each tensor."""
    made = hashlib.sha256()
    for name, value in values:
        flat = local_tensor(value.detach()).reshape(-1)
        sample = flat[:: max(1, flat.numel() // count)].contiguous().cpu()
        made.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        made.update(bytes(sample.view(torch.uint8).numpy().data))
    return made.hexdigest()[:16]


def _options(group: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in group.items() if key != "params"}
    return ", ".join(f"{key}={_plain(value)}" for key, value in sorted(plain.items()))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _hash(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:8]
