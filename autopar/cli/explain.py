"""`autopar explain` and `autopar diff`: why is a plan as it is, and what do two plans decide differently?

The model is captured again, without memory for its parameters. A plan's file may name it; what it names is run where a
person says `--trust`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ArgumentError, ClusterError, PlanMismatchError
from autopar.values.cluster import Cluster, load_cluster, load_preset

if TYPE_CHECKING:  # the command line is there before torch is
    from autopar.api.model_plan import ModelPlan
    from autopar.api.printed import PrintedDifference, PrintedExplanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a person says of the model of a saved plan.

    spec: the model, as for `autopar plan`; None for the one that the file names, which is code that the file chooses
        and is run with `trust` alone.
    overrides: as `--set`.
    """

    spec: str | None = None
    trust: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)


def source_of(saved: "ModelPlan", path: Path, given: Given) -> dict[str, Any]:
    """What `load_model` takes: sizes and precision as the file says, code and its arguments as the person does.

    Raises:
        PlanMismatchError: if neither names a model, or the file does and is not trusted.
        ModelSpecError: if the file names a model's file that is not there.
    """
    said = dict(saved.source or {"batch": None, "seq": None, "overrides": {}, "precision": saved.config.precision})
    if given.trust and saved.source is not None:
        from autopar.models.places import found_beside, seen_from

        own = given.spec is None or said["spec"] in (given.spec, seen_from(given.spec, path.parent))
        spec = given.spec or found_beside(said["spec"], path)
        return {**said, "spec": spec, "overrides": {**(said["overrides"] if own else {}), **given.overrides}}
    if given.spec is not None:
        return {**said, "spec": given.spec, "overrides": dict(given.overrides)}
    if saved.source is None:
        raise PlanMismatchError(
            f"{path} does not say where its model is (it was not made by the command line); name it with --model "
            "file.py:function, or in Python use autopar.load_plan(path).bind(model)"
        )
    sets = "".join(f" --set {key}={value}" for key, value in said["overrides"].items())
    raise PlanMismatchError(
        f"{path} says that its model is {said['spec']!r}{sets}. That is code which a file names, and it is not run "
        "unless you say so: give --trust to run it, or name the model yourself with --model (and --set)"
    )


def reloaded(path: Path, given: Given, device: str, alike: Sequence["ModelPlan"] = ()) -> "ModelPlan":
    """A saved plan with the graph of its model, which a person names or trusts the file to name.

    alike: plans whose graph it takes if it is for the same.

    Raises:
        PlanMismatchError: if nobody does, or the model is another now.
    """
    from autopar.api.model_plan import load_plan
    from autopar.models import load_model
    from autopar.values.calls import Call

    saved = load_plan(path)
    for other in alike:
        if (saved.fingerprint, saved.microbatches) == (other.fingerprint, other.microbatches):
            return replace(saved, captured=other.captured).legal()
    source = source_of(saved, path, given)
    loaded = load_model(**source, device=device)
    bound = saved.bind(loaded.model, inputs=Call(args=loaded.args, kwargs=loaded.kwargs))
    return replace(bound, source=source)


def explained(
    path: Path,
    cluster: str | None,
    seconds: float,
    given: Given,
    tell: Callable[[str], None],
    trace: Path | None = None,
) -> "PrintedExplanation":
    """The explanation of a saved plan, whose step is written to `trace`.

    Raises:
        ArgumentError: if the trace cannot be written.
        ClusterError: if the plan's cluster is not known by its name, and no `cluster` is given.
    """
    tell("capturing the model")
    plan = reloaded(path, given, "meta")
    machine = machine_of(plan, cluster, f"give --cluster for {path}")
    if trace is not None:
        plan.timeline(cluster=machine).save(trace)
    return plan.explain(cluster=machine, seconds=seconds, progress=tell)


def compared(first: Path, second: Path, given: Given, tell: Callable[[str], None]) -> "PrintedDifference":
    """The difference of two saved plans; plans of one graph capture it once.

    Raises:
        PlanMismatchError: if they are for different models, or nobody says for which.
    """
    tell(f"capturing the model of {first}")
    left = reloaded(first, given, "meta")
    tell(f"capturing the model of {second}")
    right = reloaded(second, given, "meta", alike=(left,))
    return left.diff(right)


def reported(
    path: Path,
    beside: Path | None,
    out: Path,
    cluster: str | None,
    given: Given,
    tell: Callable[[str], None],
) -> None:
    """Write a page about a saved plan, and about another beside it. Where nobody names the model, and the file is not
    trusted to, it shows what the files say.

    Raises:
        ArgumentError: if the page cannot be written, or a model is overridden that is not run.
        ClusterError: if a model is named, and the plan's cluster is not known by its name, and no `cluster` is given.
        PlanMismatchError: if the plans are for different models, or their models are others now.
    """
    from autopar.api.model_plan import ModelPlan, load_plan

    is_known = given.trust or given.spec is not None
    if given.overrides and not is_known:
        raise ArgumentError("--set is for the plan's model, which is not run; name it with --model, or give --trust")
    machine = load_cluster(cluster) if cluster is not None else None
    plans = list[ModelPlan]()
    for file in (path, beside):
        if file is None:
            continue
        if is_known:
            tell(f"capturing the model of {file}")
            plans.append(reloaded(file, given, "meta", alike=plans))
            machine = machine_of(plans[-1], cluster, f"give --cluster for {file}") if machine is None else machine
        else:
            plans.append(load_plan(file))
    tell("drawing")
    names = (path.name, beside.name if beside is not None and beside.name != path.name else str(beside))
    plans[0].report(out, beside=plans[1] if beside is not None else None, cluster=machine, names=names)


def machine_of(plan: "ModelPlan", cluster: str | None, remedy: str) -> Cluster:
    """The preset that a plan names, or the cluster that is given: a plan's file names no other file."""
    try:
        return load_cluster(cluster) if cluster is not None else load_preset(plan.cluster)
    except ClusterError as error:
        if cluster is not None:
            raise
        raise ClusterError(
            f"the plan is for cluster {plan.cluster!r}, which is no preset; {remedy}: the file that describes it"
        ) from error
