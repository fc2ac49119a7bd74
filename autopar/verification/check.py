"""What is said of one plan against one process, and what rounding explains."""

from dataclasses import dataclass

from autopar.lower.messages import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """One plan against one process: largest relative errors over all ranks and steps, and messages as predicted and
    as counted in the first.

    state: buffers, and parameters that forward writes, after the step.

    Peaks are bytes of tensors that a rank holds at once, without optimizer state: of the rank that is farthest off.
    """

    plan: str
    loss: float
    loss_error: float
    gradient_error: float
    worst_gradient: str
    state_error: float
    worst_state: str
    predicted: Sent
    counted: Sent
    predicted_peak: float
    measured_peak: int

    @property
    def bytes_match(self) -> bool:
        return self.predicted == self.counted

    @property
    def peak_error(self) -> float:
        """How far the prediction is from what was measured, relative to that; negative: too low."""
        return self.predicted_peak / self.measured_peak - 1

    def wrong(self, loss_tolerance: float, gradient_tolerance: float) -> tuple[str, ...]:
        """What is not as it should be: some of loss, gradients, state, bytes sent and peak memory."""
        good = {
            "loss": self.loss_error <= loss_tolerance,
            "gradients": self.gradient_error <= gradient_tolerance,
            "state": self.state_error <= gradient_tolerance,
            "bytes sent": self.bytes_match,
            "peak memory": abs(self.peak_error) <= PEAK_TOLERANCE,
        }
        return tuple(name for name, is_good in good.items() if not is_good)


PEAK_TOLERANCE = 0.05
"""Largest relative error of a rank's predicted peak."""

TOLERANCES = {
    "fp64": (1e-10, 1e-8),
    "fp32": (1e-5, 1e-3),
    "bf16": (2e-2, 1e-1),
    "bf16-mixed": (2e-2, 1e-1),
    "fp32-mixed": (1e-5, 1e-3),
}
"""Largest relative error of the loss and of any gradient that rounding explains, by precision."""


def merge(checks: list[PlanCheck]) -> PlanCheck:
    """The worst rank's errors; messages must agree on all ranks, or the first that differs is shown."""
    worst = max(checks, key=lambda c: (c.gradient_error != c.gradient_error, c.gradient_error))
    written = max(checks, key=lambda c: (c.state_error != c.state_error, c.state_error))
    odd = next((c for c in checks if not c.bytes_match), checks[0])
    farthest = max(checks, key=lambda c: abs(c.peak_error))
    return PlanCheck(
        plan=checks[0].plan,
        loss=checks[0].loss,
        loss_error=max(c.loss_error for c in checks),
        gradient_error=worst.gradient_error,
        worst_gradient=worst.worst_gradient,
        state_error=written.state_error,
        worst_state=written.worst_state,
        predicted=odd.predicted,
        counted=odd.counted,
        predicted_peak=farthest.predicted_peak,
        measured_peak=farthest.measured_peak,
    )
