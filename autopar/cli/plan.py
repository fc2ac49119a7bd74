"""`autopar plan` and `autopar export`: from what a command line says of a model to its plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.api.arguments import check_words
from autopar.api.checked import check_spec
from autopar.api.planning import plan as make_plan
from autopar.cli.progress import ProgressLine
from autopar.errors import ArgumentError
from autopar.models import load_model
from autopar.models.places import seen_from
from autopar.search.asked_mesh import asked_mesh
from autopar.search.joint.workers import started
from autopar.values.cluster import load_cluster

PRECISION = "fp32"
"""Of a plan where none is said."""
UNSAID = f"precision {PRECISION} (for GPUs: --precision bf16-mixed)"


def planned(source: dict[str, Any], *, device: str, check: bool, tell: ProgressLine, **arguments: Any) -> Any:
    """The plan of the model that `source` names, which it carries along. A model without values is built once more,
    with values and small, to `check` its graph."""
    is_said = source["precision"] is not None
    source = source if is_said else {**source, "precision": PRECISION}
    # What is quickly refused is refused before a model is built.
    check_words({**arguments, "precision": source["precision"]})
    arguments["cluster"] = load_cluster(arguments["cluster"])
    named = ("mesh", "pipeline", "schedule", "baseline", "solver")
    asked_mesh(arguments["cluster"], **{name: arguments[name] for name in named if name in arguments})
    tell("building the model")
    with started(arguments["cluster"].num_devices if arguments.get("mesh") == "auto" else 1):
        loaded = load_model(**source, device=device)
        assumed = (*(() if is_said else (UNSAID,)), *loaded.assumed)
        if assumed:
            tell.note(f"assumed: {', '.join(assumed)}")
        called = {"args": loaded.args, "kwargs": loaded.kwargs, "precision": source["precision"]}
        nbytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
        checked = check_spec(nbytes=nbytes, tell=tell, **source) if check and device == "meta" else ""
        made = make_plan(loaded.model, **called, **arguments, check=check and not checked, progress=tell)
        return replace(made, source=source, checked=checked or made.checked, assumed=assumed)


def write_plan(made: Any, out: Path) -> None:
    """Save a plan as `out`.json, or export it into the folder `out`; what it names stands relative to that place.

    Raises:
        ArgumentError: if it cannot be written.
    """
    is_file, source = out.suffix == ".json", made.source
    folder = out.parent if is_file else out
    own = replace(made, source={**source, "spec": seen_from(source["spec"], folder)})
    if is_file:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.save(out)
        except OSError as error:
            raise ArgumentError(
                f"the plan cannot be written to {out}: {error.strerror}; choose another --out"
            ) from error
    else:
        with_values(own, source).export(out)


def with_values(made: Any, source: dict[str, Any]) -> Any:
    """The plan with values of buffers and inputs, for an export: the model is built again, with memory this time."""
    if all(not value.is_meta for value in made.values.values()):
        return made
    loaded = load_model(**source, device="cpu")
    return replace(made.bind(loaded.model), call=replace(made.call, args=loaded.args, kwargs=loaded.kwargs))
