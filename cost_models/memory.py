"""How many bytes are live, when, and what does the optimizer keep and move?

Memory is a set of live intervals [start, end) and the peak is a maximum over moments, never a sum over everything.

torch's optimizers keep their state in the parameter's own dtype, under mixed precision the stored one: adam and adamw
two tensors (exp_avg, exp_avg_sq), sgd with momentum one, sgd none. Their `step` counter, 4 bytes a parameter tensor, is
left out.

A plan's training script makes an optimizer of torch's defaults (torch.optim, "Algorithms": foreach on CUDA, else a loop
over parameters), one elementwise kernel after another (`_single_tensor_adamw` and its like in torch/optim):

    adamw          mul_ 2, lerp_ 3, mul_ 2, addcmul_ 3, sqrt 2, div 2, add_ 2, addcdiv_ 4: 20 tensors read or written
    adam           the same without the decay's mul_: 18
    sgd            add_ 3
    sgd-momentum   mul_ 2, add_ 3, add_ 3: 8

A loop launches every kernel for each parameter; foreach launches it for some thirty at once, whose part is less than
the one launch a parameter that is counted. A fused kernel reads parameter, gradient and states and writes parameter and
states, each once, the least that any can: 7, 7, 3 and 5 tensors. `adamw-fused` and so on are torch's with `fused=True`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.cost_models.compute import Rates
from autopar.values.choices import check_choice
from autopar.values.train_config import FUSED, NUM_STATES, STATES

KERNELS: dict[str, tuple[int, ...]] = {
    "adamw": (2, 3, 2, 3, 2, 2, 2, 4),
    "adam": (3, 2, 3, 2, 2, 2, 4),
    "sgd": (3,),
    "sgd-momentum": (2, 3, 3),
    **{name + FUSED: (3 + 2 * count,) for name, count in STATES.items()},
}
"""Tensors that each kernel of a step of torch's reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`nbytes` are live from moment `start` up to, and not at, moment `end`; nothing is live if `end <= start`."""

    start: int
    end: int
    nbytes: int


class Peak(NamedTuple):
    """The most bytes live at once, the first such moment, and the positions of the intervals live then."""

    nbytes: int
    moment: int
    contributors: tuple[int, ...]


def peak(intervals: Sequence[Interval]) -> Peak:
    """The peak of `intervals`, by a sweep over their starts; `Peak(0, 0, ())` if nothing is ever live."""
    table = np.array([(i.start, i.end, i.nbytes) for i in intervals if i.end > i.start], dtype=np.int64).reshape(-1, 3)
    if not len(table):
        return Peak(0, 0, ())
    start, end, nbytes = table.T
    # Memory grows at starts only, so the peak is at one of them.
    moments = np.unique(start)
    live = _total_before(start, nbytes, moments) - _total_before(end, nbytes, moments)
    best = int(live.argmax())
    moment = int(moments[best])
    contributors = tuple(k for k, i in enumerate(intervals) if i.start <= moment < i.end)
    return Peak(int(live[best]), moment, contributors)


def optimizer_state_nbytes(optimizer: str, element_size: int) -> int:
    """Bytes of optimizer state for each parameter element of `element_size` bytes.

    Raises:
        ArgumentError: if the optimizer is not in `NUM_STATES`.
    """
    _require_known(optimizer)
    return NUM_STATES[optimizer] * element_size


def optimizer_step_seconds(
    optimizer: str,
    num_elements: float,
    element_size: int,
    rates: Rates,
    computed_size: int | None = None,
    *,
    is_split: bool = False,
) -> float:
    """Seconds of one step over `num_elements` parameter elements held by a device of these rates.

    computed_size: bytes of an element in compute, where that is narrower than what is stored: with both casts.
    is_split: the device has a part of the parameter.

    Raises:
        ArgumentError: if the optimizer is not in `NUM_STATES`.
    """
    _require_known(optimizer)
    kernels = KERNELS[optimizer]
    casts = cast_nbytes(element_size, element_size if computed_size is None else computed_size)
    launches = len(kernels) * rates.split_seconds if is_split else 0.0
    return rates.update((sum(kernels) * element_size + casts) * num_elements, len(kernels)) + launches


def cast_nbytes(element_size: int, computed_size: int) -> int:
    """Bytes that mixed precision moves a step for each parameter element: the parameter cast down, its gradient up."""
    return 0 if element_size == computed_size else 2 * (element_size + computed_size)


def fused_update_nbytes(num_states: int, element_size: int) -> int:
    """Bytes that an update in one kernel moves for each parameter element: parameter, gradient and states read, all but
    the gradient written."""
    return (3 + 2 * num_states) * element_size


def _require_known(optimizer: str) -> None:
    check_choice("optimizer", optimizer, NUM_STATES)


def _total_before(
    events: np.ndarray[tuple[int], np.dtype[np.int64]],
    nbytes: np.ndarray[tuple[int], np.dtype[np.int64]],
    moments: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each moment, the bytes whose event is at that moment or earlier."""
    order = np.argsort(events, kind="stable")
    totals = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(nbytes[order])])
    return totals[np.searchsorted(events[order], moments, side="right")]
