"""Does a plan do what it says? Run on processes of this machine, against one process."""

from autopar.verification.check import PEAK_TOLERANCE, TOLERANCES, PlanCheck
from autopar.verification.one_process import draws, reference_gradients
from autopar.verification.rank_check import DEVICES
from autopar.verification.run import verify_plans

__all__ = [
    "DEVICES",
    "PEAK_TOLERANCE",
    "TOLERANCES",
    "PlanCheck",
    "draws",
    "reference_gradients",
    "verify_plans",
]
