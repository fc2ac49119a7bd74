"""Is the captured graph the user's model? The module itself, run eagerly, says so: in value, in gradient, in state."""

from autopar.oracle.compare import StepDifference, Tolerance, compare_steps, first_beyond
from autopar.oracle.module_check import Subject, check_module, not_checkable
from autopar.oracle.steps import TrainedStep, graph_steps, module_steps, other_samples

__all__ = [
    "StepDifference",
    "Subject",
    "Tolerance",
    "TrainedStep",
    "check_module",
    "compare_steps",
    "first_beyond",
    "graph_steps",
    "module_steps",
    "not_checkable",
    "other_samples",
]
