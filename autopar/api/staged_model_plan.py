"""A plan with stages and the model it is for: saved with how the model is called, loaded without the captured graph.

`bind` (or `distribute`) captures the graph again and checks it, `distribute` makes the module that trains.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar.api.model_plan import ModelPlan, model_plan
from autopar.api.planning import captured_for, values_of
from autopar.errors import MeshError, PlanMismatchError
from autopar.passes.split_stages import split_stages
from autopar.values.calls import Call, call_from_json, call_of
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.staged_plan import StagedPlan, staged_plan_from_json

if TYPE_CHECKING:
    from autopar.api.model_plan import ModelPlan
    from autopar.search.explanation.compare import Difference
    from autopar.search.explanation.explain_stages import StagedExplanation
    from autopar.search.timeline.plan_timeline import PlanTimeline
    from autopar.search.timeline.weave import Overlap


@dataclass(frozen=True, kw_only=True, repr=False)
class StagedModelPlan(StagedPlan):
    """A plan with stages, the graph it is for (None when just loaded), how the model is called, where it came from.

    captured: that of one micro-batch of the whole model. source, machine, loss_fn, values, checked: as of `ModelPlan`.
    """

    captured: CapturedModel | None = field(default=None, compare=False)
    call: Call | None = field(default=None, compare=False)
    source: Mapping[str, Any] | None = field(default=None, compare=False)
    machine: Cluster | None = field(default=None, compare=False)
    loss_fn: Callable[..., Any] | None = field(default=None, compare=False)
    values: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    checked: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[CapturedModel, ...]:
        """The captured model in its stages.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
        """
        return split_stages(self.graph, self.cuts)

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

    def bind(
        self, model: nn.Module, *, loss_fn: Callable[..., Any] | None = None, inputs: Any = None
    ) -> "StagedModelPlan":
        """The same plan with the graph of `model`, captured at the shapes that it was planned for.

        Raises:
            PlanMismatchError: if the plan is for another model, or no inputs are known.
        """
        loss_fn = loss_fn or self.loss_fn
        captured, call = self.captured, call_of(inputs) if inputs is not None else self.call
        if captured is None:
            if call is None:
                raise PlanMismatchError(
                    "this plan was saved without the inputs of a call; give distribute(..., example_inputs=...)"
                )
            captured, call = captured_for(self, model, call, loss_fn)
        self.check(captured)
        return replace(self, captured=captured, call=call, loss_fn=loss_fn, values=values_of(captured, model))

    def explain(
        self,
        *,
        cluster: Cluster | None = None,
        seconds: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> "StagedExplanation":
        """What each stage takes and holds, what the pipeline idles, what binds, what a change would buy; it prints.

        Args and raises: as `ModelPlan.explain`.
        """
        from autopar.search.explanation.explain_stages import explain_stages

        machine = cluster or self.machine or load_cluster(self.cluster)
        return explain_stages(self, self.graph, machine, seconds=seconds, progress=progress)

    def diff(self, other: "StagedModelPlan | ModelPlan") -> "Difference":
        """What this plan (the first) and another, with stages or without, decide differently; it prints as tables.

        Raises:
            PlanMismatchError: if they are for different models, or one is not bound to its model.
        """
        from autopar.search.explanation.compare import compare

        return compare(self, other, self.graph, other.graph)

    def export(self, folder: str | Path) -> None:
        """Write plan.json, a file of code a stage, specs.json, state.pt (if needed) and train.py into `folder`.

        Raises:
            PlanMismatchError: if the plan was loaded and is not bound to a model.
            ArgumentError: if the folder cannot be written.
        """
        from autopar.export.stages import export_stages

        export_stages(Path(folder), self.graph, self.parts, self, self.to_json(), self.values)

    def alternatives(
        self,
        count: int = 5,
        *,
        cluster: Cluster | None = None,
        seconds: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> "tuple[ModelPlan | StagedModelPlan, ...]":
        """The search's next best plans, with other stages or none, cheapest first, each as runnable as this one.

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

        machine, program = cluster or self.machine or load_cluster(self.cluster), make_program(self.graph)
        found = next_best(self, program, machine, count, seconds=seconds, tell=progress or (lambda _: None))
        own = {f.name: getattr(self, f.name) for f in fields(StagedModelPlan) if not f.compare}
        return tuple(
            staged_model_plan(plan, **own) if isinstance(plan, StagedPlan) else model_plan(plan, **own)
            for plan in found
        )

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

        return plan_timeline(self, self.parts, cluster or self.machine or load_cluster(self.cluster), overlap)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        body = json.loads(super().to_json())
        body["call"] = self.call.to_json() if self.call is not None else None
        body["source"] = dict(self.source) if self.source is not None else None
        body["checked"] = self.checked
        return json.dumps(body, indent=1)

    def __repr__(self) -> str:
        return (
            f"<plan of {self.model} in {self.num_stages} stages on {self.pipeline} of mesh {self.mesh} of "
            f"{self.cluster}, {self.schedule}, {self.microbatches} micro-batches ({self.origin})>"
        )


def staged_model_plan(plan: StagedPlan, **more: Any) -> StagedModelPlan:
    """`plan` with what is known of its model."""
    own = {f.name: getattr(plan, f.name) for f in fields(StagedPlan)}
    return StagedModelPlan(**{**own, **more})


def staged_plan_from_text(text: str) -> StagedModelPlan:
    """The inverse of `StagedModelPlan.to_json` (its graph left out)."""
    plan = staged_plan_from_json(text)
    body = json.loads(text)
    call = body.get("call")
    known = {"source": body.get("source"), "checked": body.get("checked", "")}
    return staged_model_plan(plan, call=call_from_json(call) if call else None, **known)


def distribute_stages(
    model: nn.Module,
    plan: StagedPlan,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    outputs: str = "whole",
) -> nn.Module:
    """`autopar.distribute` for a plan with stages.

    Raises:
        MeshError, PlanMismatchError, RankError: as `distribute`.
        ArgumentError: if the torch at hand lacks the schedule.
    """
    from autopar.api.again import captor_of
    from autopar.runtime import PipelinedModule, init
    from autopar.runtime.agreement import failing_together

    init()
    with failing_together():
        check_ranks(plan)
        own = plan if isinstance(plan, StagedModelPlan) else staged_model_plan(plan)
        bound = own.bind(model, loss_fn=loss_fn, inputs=example_inputs)
        captured, parts = bound.captured, bound.parts
        assert captured is not None
        captor = captor_of(bound, model)
    return PipelinedModule(captured, parts, plan, bound.values, bare=captor.call.bare, captor=captor, outputs=outputs)


def check_ranks(plan: StagedPlan) -> None:
    """Raises MeshError if torchrun started another number of processes than the plan has ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.world:
        raise MeshError(
            f"the plan runs {plan.num_stages} stages on {plan.pipeline} pipeline ranks of mesh {plan.mesh}, "
            f"{plan.world} ranks in all, but {world} processes were started; start torchrun --nproc-per-node "
            f"{plan.world}, or plan for {world} devices"
        )
