"""A plan with the model it is for: what `autopar.plan` returns. It prints, exports and saves.

Saved, it is the plan's JSON and beside it how the model is called and, where a command line named it, its spec; loaded,
it is the same plan without the captured graph, which `bind` (or `distribute`) captures again and checks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar.errors import ArgumentError, PinError, PlanMismatchError
from autopar.values.calls import Call, call_of
from autopar.values.cluster import Cluster, load_preset
from autopar.values.domains import NOT_NEGATIVE, SECONDS, checked_number
from autopar.values.graph import CapturedModel
from autopar.values.local_model import LocalModel
from autopar.values.plan import Plan
from autopar.values.plan_file import SavedPlan, load_saved, saved_from

if TYPE_CHECKING:
    from autopar.api.printed import PrintedDifference, PrintedExplanation
    from autopar.report.page_data import Pictured
    from autopar.search.timeline.plan_timeline import PlanTimeline
    from autopar.search.timeline.weave import Overlap


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelPlan(Plan):
    """A plan, the graph it is for (None when just loaded), how the model is called, and where it came from.

    captured: that of one micro-batch of the whole model.
    source: what the command line was told of the model: `spec`, `batch`, `seq`, `overrides`.
    machine: the cluster as a value, if it is known.
    values: tensors of parameters and buffers by placeholder, if the model is at hand (for buffers in an export).
    checked: on what the graph was compared with the module, or why not.
    assumed: what the command line was not told and chose itself, in words.
    """

    captured: CapturedModel | None = field(default=None, compare=False)
    call: Call | None = field(default=None, compare=False)
    source: Mapping[str, Any] | None = field(default=None, compare=False)
    machine: Cluster | None = field(default=None, compare=False)
    loss_fn: Callable[..., Any] | None = field(default=None, compare=False)
    values: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    checked: str = field(default="", compare=False)
    assumed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def graph(self) -> CapturedModel:
        """That of one micro-batch of the whole model.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
        """
        if self.captured is None:
            raise PlanMismatchError(
                f"this plan was loaded from a file and has no graph of {self.model}; call plan.bind(model) first"
            )
        return self.captured

    @cached_property
    def parts(self) -> tuple[CapturedModel, ...]:
        """The captured model in its stages.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
        """
        from autopar.passes.split_stages import split_stages

        return split_stages(self.graph, self.cuts)

    @cached_property
    def locals(self) -> tuple[LocalModel, ...]:
        """The graphs that the ranks of each stage run.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
        """
        from autopar.cost_models.compute import HOST
        from autopar.lower.emit import emit_stage

        on_host = None if self.machine is None else self.machine.device.name == HOST
        numbers = range(self.num_stages)
        return tuple(emit_stage(self.parts, self.stages, number, on_host=on_host) for number in numbers)

    def bind(self, model: nn.Module, *, loss_fn: Callable[..., Any] | None = None, inputs: Any = None) -> "ModelPlan":
        """The same plan with the graph of `model`, captured at the shapes that it was planned for.

        Raises:
            PlanMismatchError: if the plan is for another model, or no inputs are known.
        """
        from autopar.api.captures import captured_for, values_of

        loss_fn = loss_fn or self.loss_fn
        captured, call = self.captured, call_of(inputs) if inputs is not None else self.call
        if captured is None:
            if call is None:
                raise PlanMismatchError(
                    "this plan was saved without the inputs of a call; give distribute(..., example_inputs=...)"
                )
            captured, call = captured_for(self, model, call, loss_fn)
        values = values_of(captured, model)
        return replace(self, captured=captured, call=call, loss_fn=loss_fn, values=values).legal()

    def legal(self) -> "ModelPlan":
        """The plan itself, which was read from a file and is one of its graph.

        Raises:
            PlanMismatchError: if it is for another model, or says of this one what cannot be.
        """
        from autopar.lower.legality import check_legal, check_shared
        from autopar.lower.program import make_program

        self.check(self.graph)
        check_shared(self.parts, self.stages)
        for part, stage in zip(self.parts, self.stages, strict=True):
            stage.check(part)
            check_legal(make_program(part), stage)
        try:
            broken = self.broken_pins()
        except PinError as error:
            raise PlanMismatchError(
                f"the plan records pins that are none of this model: {error}; plan again"
            ) from error
        if broken:
            raise PlanMismatchError(f"the plan does not honour the pins that it records: {broken[0]}; plan again")
        return self

    def broken_pins(self) -> list[str]:
        """What the plan decides otherwise than its pins say, in words.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
        """
        from autopar.lower.pinned import find_pinned, violations
        from autopar.lower.program import make_program

        pins = self.config.pins
        return list(violations(find_pinned(make_program(self.graph), pins), self.stages)) if pins else []

    def export(self, folder: str | Path) -> None:
        """Write plan.json, the code of each stage, specs.json, state.pt (if needed) and train.py into `folder`.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
            ArgumentError: if the folder cannot be written.
        """
        from autopar.export.folder import export_folder

        examples = self.call.tensors() if self.call is not None else {}
        export_folder(Path(folder), self.graph, self.locals, self, self.values, examples)

    def explain(
        self,
        *,
        cluster: Cluster | None = None,
        seconds: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> "PrintedExplanation":
        """What binds, what more memory or faster links would buy, which plans were near; of several stages what each
        takes and holds, and what the pipeline idles. It prints as tables.

        Args:
            cluster: the plan's machine, if it was loaded from a file and its cluster is no preset.
            seconds: of solving, after which no more is asked.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
            ClusterError: if the cluster is not known.
        """
        from autopar.api.printed import PrintedExplanation, fields_of
        from autopar.search.explanation.explain import explain

        checked_number("seconds", seconds, SECONDS)
        found = explain(self, self.graph, self._machine(cluster), seconds=seconds, progress=progress)
        return PrintedExplanation(**fields_of(found))

    def diff(self, other: "ModelPlan") -> "PrintedDifference":
        """What this plan (the first) and another, of other stages or not, decide differently, and what each takes; it
        prints as tables.

        Raises:
            ArgumentError: if the other is no such plan.
            PlanMismatchError: if they are for different models, or one is not bound to its model.
        """
        if not isinstance(other, ModelPlan):
            raise ArgumentError(
                f"a plan is compared with {type(other).__name__}; give another plan, from autopar.plan or load_plan"
            )
        from autopar.api.printed import PrintedDifference, fields_of
        from autopar.search.explanation.compare import compare

        return PrintedDifference(**fields_of(compare(self, other, self.graph, other.graph)))

    def report(
        self,
        path: str | Path,
        *,
        beside: "ModelPlan | None" = None,
        cluster: Cluster | None = None,
        names: tuple[str, str] = ("this plan", "the other"),
    ) -> None:
        """Write a page for a browser, one file that needs no network: what the plan decides of each module, each
        tensor's shards on the mesh, the step and its memory over time, bytes by collective, bound, gap and baselines.

        A plan that was loaded and is not bound to its model shows what its file says, and says what is missing.

        Args:
            path: the file to write, such as report.html.
            beside: another plan, which is shown beside this one.
            cluster: the machine of plans that were loaded from files and whose cluster is no preset.
            names: what the page calls the two.

        Raises:
            ArgumentError: if the file cannot be written.
            PlanMismatchError: if both plans are bound and are for different models.
            ClusterError: if a plan is bound and its cluster is not known.
        """
        from autopar.report.page import write_page
        from autopar.report.page_data import page_data

        plans = [self] if beside is None else [self, beside]
        are_bound = all(plan.captured is not None for plan in plans)
        difference = self.diff(beside) if beside is not None and are_bound else None
        shown = [plan._pictured(name, cluster) for plan, name in zip(plans, names, strict=False)]
        write_page(page_data(shown, difference), path)

    def _pictured(self, name: str, cluster: Cluster | None) -> "Pictured":
        from autopar.report.page_data import Pictured
        from autopar.search.explanation.picture import picture_step

        if self.captured is None:
            return Pictured(name=name, plan=self, machine=cluster or self.machine)
        machine = self._machine(cluster)
        picture = picture_step(self, self.parts, machine)
        return Pictured(name=name, plan=self, stages=self.parts, picture=picture, machine=machine)

    def timeline(self, *, overlap: "Overlap | None" = None, cluster: Cluster | None = None) -> "PlanTimeline":
        """When everything in a step runs: its seconds, and with `.save("step.json")` a trace for ui.perfetto.dev.

        Args:
            overlap: which collectives run beside compute; None for none: then the seconds are the estimate's.
            cluster: the plan's machine, if it was loaded from a file and its cluster is no preset.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
            ClusterError: if the cluster is not known.
        """
        from autopar.search.timeline.plan_timeline import plan_timeline

        return plan_timeline(self, self.parts, self._machine(cluster), overlap)

    def alternatives(
        self,
        count: int = 5,
        *,
        cluster: Cluster | None = None,
        seconds: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> "tuple[ModelPlan, ...]":
        """The search's next best plans, cheapest first, each as runnable as this one.

        Args:
            count: how many at most.
            cluster: the plan's machine, if it was loaded from a file and its cluster is no preset.
            seconds: of searching.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
            ClusterError: if the cluster is not known.
        """
        from autopar.lower.program import make_program
        from autopar.search.explanation.next_best import next_best

        checked_number("count", count, NOT_NEGATIVE)
        checked_number("seconds", seconds, SECONDS)
        machine, program = self._machine(cluster), make_program(self.graph)
        found = next_best(self, program, machine, count, seconds=seconds, tell=progress or (lambda _: None))
        own = {f.name: getattr(self, f.name) for f in fields(ModelPlan) if not f.compare}
        return tuple(model_plan(plan, **own) for plan in found)

    def _machine(self, cluster: Cluster | None) -> Cluster:
        return cluster or self.machine or load_preset(self.cluster)

    def to_json(self) -> str:
        body = json.loads(super().to_json())
        body["call"] = self.call.to_json() if self.call is not None else None
        body["source"] = dict(self.source) if self.source is not None else None
        body["checked"] = self.checked
        return json.dumps(body, indent=1)

    def __str__(self) -> str:
        from autopar.report.plan_text import plan_text

        return plan_text(self, () if self.captured is None else self.locals, self.machine)

    def __repr__(self) -> str:
        return f"<plan of {self.model} on {self.arrangement} of {self.cluster} ({self.origin}): print it>"


def model_plan(plan: Plan, **more: Any) -> ModelPlan:
    """`plan` with what is known of its model."""
    own = {f.name: getattr(plan, f.name) for f in fields(plan)}
    return ModelPlan(**{**own, **more})


def load_plan(path: str | Path) -> ModelPlan:
    """A saved plan. Nothing that the file names is imported or called; `bind` takes the model that you give.

    Raises:
        PlanFileError: if the file is missing or is no plan.
        PlanMismatchError: if it is one for another version of autopar or torch.
    """
    return _of_saved(load_saved(path))


def plan_from_text(text: str) -> ModelPlan:
    """The inverse of `ModelPlan.to_json` (its graph left out). Raises as `load_plan` does."""
    return _of_saved(saved_from(text))


def _of_saved(saved: SavedPlan) -> ModelPlan:
    source = None if saved.source is None else asdict(saved.source)
    return model_plan(saved.plan, call=saved.call, source=source, checked=saved.checked)
