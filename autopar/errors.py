"""Which errors a user can cause, each with what was asked, what was found and what to change."""


class AutoparError(ValueError):
    """Base of every error that a user of autopar can cause."""


class CaptureError(AutoparError):
    """The model cannot be captured by torch.export; names the user's own file and line."""


class TurningFlagError(CaptureError):
    """Forward decides on a buffer that the step changes, so that the next step may need another graph."""


class FidelityError(CaptureError):
    """The captured graph computes something else than the module does; names the first line that differs."""


class DataCheckError(AutoparError, AssertionError):
    """A check of values in the model's own code failed; names the user's file and line, and what the model says."""


class NoLossError(AutoparError):
    """The model returns no scalar loss and no `loss_fn` was given.

    `at_shell` says the same to who is at a shell, where no `loss_fn` can be given; None where the message does.
    """

    def __init__(self, message: str, *, at_shell: str | None = None) -> None:
        super().__init__(message)
        self.at_shell = at_shell


class ModelSpecError(AutoparError):
    """`file.py:function`, `module:function` or `hf:config.json` does not name a model."""


class ClusterError(AutoparError):
    """Unknown cluster preset, or a cluster file that is not valid."""


class MeshError(AutoparError):
    """A mesh that does not match the cluster or the world size."""


class ArgumentError(AutoparError):
    """An argument outside its domain: unknown optimizer, precision, baseline, ..."""


class RuleError(AutoparError):
    """A sharding rule for a user's op that is not valid, or that running the op refutes."""


class BatchError(AutoparError):
    """A batch that does not divide over the ranks, or inputs of other shapes than were planned."""


class InfeasibleError(AutoparError):
    """No plan meets the memory limit (or a baseline does not apply); says the least that would do.

    `least_nbytes` is that least limit a device, or one below which nothing can fit, as the message says; None where it
    is not known, or memory is not what stands in the way.
    """

    def __init__(self, message: str, *, least_nbytes: float | None = None) -> None:
        super().__init__(message)
        self.least_nbytes = least_nbytes


class SearchTimeoutError(AutoparError):
    """The time given ended before any solution was found. `bound`: seconds that every solution is proved to take."""

    def __init__(self, message: str, *, bound: float = 0.0) -> None:
        super().__init__(message)
        self.bound = bound


class ContestFileError(AutoparError):
    """A strategy graph file that is not valid, or a choice of options that is not one of its graph."""


class PinError(AutoparError):
    """A pin that matches nothing, says what is none of its words, or contradicts another; names what is near."""


class ImpossiblePinError(InfeasibleError):
    """A pin that no plan of this model on this mesh can honour; says what there is to choose from."""


class PlanMismatchError(AutoparError):
    """A plan made for another model, mesh or library version."""


class PlanFileError(PlanMismatchError):
    """A file that is no plan as autopar saves it; says where in the file, what was found and what was expected."""


class OptimizerError(AutoparError):
    """An optimizer that cannot serve DTensor parameters."""


class MissingPackageError(AutoparError, ImportError):
    """A package that a part of autopar needs is not installed; says how to install it."""


class RankError(AutoparError, RuntimeError):
    """Ranks that disagree, or a rank that died."""


class CheckpointError(AutoparError):
    """A checkpoint that could not be written, or a folder that holds no whole one."""


class PassError(AssertionError):
    """An invariant of ours is broken, in a rewritten graph or an answer: our fault, never the user's."""
