"""How long do whole training steps take while all ranks compute? The yardsticks of `reference_steps`, over and over.

Operations measured one by one find their operands in the caches, their code warm and Python idle; within a step each
follows another, and ranks that share a core take the caches from one another at every switch.
"""

from collections.abc import Callable, Sequence

import torch

from autopar.calibration.reference_steps import SIZES, STEPS, training_step
from autopar.calibration.samples import StepSample
from autopar.calibration.timing import Tell, TimedRounds

IN_A_ROW = 5
"""Some time slices of the scheduler, as `timing.SAMPLE_SECONDS`."""


class StepRounds:
    """Training steps, round by round, of those whose dtype is measured; all ranks make and call this together."""

    def __init__(self, dtypes: Sequence[str], *, device: torch.device, tell: Tell) -> None:
        self.steps = [step for step in STEPS[device.type] if SIZES[step[0]].precision in dtypes]
        calls = [_in_a_row(training_step(batch, size, device, kind)) for size, batch, kind in self.steps]
        self.rounds = TimedRounds(calls, device, tell, "training steps")

    def run(self, tell: Tell) -> None:
        self.rounds.run(tell)

    def samples(self) -> tuple[StepSample, ...]:
        return tuple(
            StepSample(batch=batch, seconds=seconds / IN_A_ROW, size=size, kind=kind)
            for (size, batch, kind), seconds in zip(self.steps, self.rounds.typical(), strict=True)
        )


def _in_a_row(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(IN_A_ROW):
            step()

    return run
