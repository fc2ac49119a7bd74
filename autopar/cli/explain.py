"""`autopar explain` and `autopar diff`: why is a plan as it is, and what do two plans decide differently?

The models that the plans name are captured again, without memory for their parameters.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import ClusterError, PlanMismatchError
from autopar.values.cluster import Cluster, load_cluster

if TYPE_CHECKING:  # the command line is there before torch is
    from autopar.api.model_plan import ModelPlan
    from autopar.api.printed import PrintedDifference, PrintedExplanation


def reloaded(path: Path, overrides: dict[str, str], device: str) -> "ModelPlan":
    """A saved plan with the graph of the model that it says it is for.

    Raises:
        PlanMismatchError: if the plan does not say, or the model is another now.
    """
    from autopar.api.model_plan import load_plan
    from autopar.models import load_model
    from autopar.values.calls import Call

    saved = load_plan(path)
    if saved.source is None:
        raise PlanMismatchError(
            f"{path} does not say where its model is (it was not made by the command line); in Python, "
            "autopar.load_plan(path).bind(model) has .export(folder), .explain() and .diff(other)"
        )
    source = dict(saved.source)
    source["overrides"] = {**source["overrides"], **overrides}
    loaded = load_model(**source, device=device)
    return saved.bind(loaded.model, inputs=Call(args=loaded.args, kwargs=loaded.kwargs))


def explained(
    path: Path,
    cluster: str | None,
    seconds: float,
    overrides: dict[str, str],
    tell: Callable[[str], None],
    trace: Path | None = None,
) -> "PrintedExplanation":
    """The explanation of a saved plan, whose step is written to `trace`.

    Raises:
        ArgumentError: if the trace cannot be written.
        ClusterError: if the plan's cluster is not known by its name, and no `cluster` is given.
    """
    tell("capturing the model")
    plan = reloaded(path, overrides, "meta")
    machine = machine_of(plan, cluster, f"give --cluster for {path}")
    if trace is not None:
        plan.timeline(cluster=machine).save(trace)
    return plan.explain(cluster=machine, seconds=seconds, progress=tell)


def compared(first: Path, second: Path, tell: Callable[[str], None]) -> "PrintedDifference":
    """The difference of two saved plans; plans of one graph capture it once.

    Raises:
        PlanMismatchError: if they are for different models, or one does not say for which.
    """
    from autopar.api.model_plan import load_plan

    tell(f"capturing the model of {first}")
    left = reloaded(first, {}, "meta")
    right = load_plan(second)
    if (right.fingerprint, right.microbatches) == (left.fingerprint, left.microbatches):
        right = replace(right, captured=left.captured)
    else:
        tell(f"capturing the model of {second}")
        right = reloaded(second, {}, "meta")
    return left.diff(right)


def machine_of(plan: "ModelPlan", cluster: str | None, remedy: str) -> Cluster:
    """The cluster that a plan names, or that is given."""
    try:
        return load_cluster(cluster or plan.cluster)
    except ClusterError as error:
        if cluster is not None:
            raise
        raise ClusterError(
            f"the plan is for cluster {plan.cluster!r}, which is no preset; {remedy}: the file that describes it"
        ) from error
