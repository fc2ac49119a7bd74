"""A saved plan, for the graph of its model in the precision that `autopar verify` compares in."""

from collections.abc import Callable
from dataclasses import fields, replace

from torch import nn

from autopar.api.model_plan import ModelPlan
from autopar.errors import AutoparError, PlanMismatchError
from autopar.lower.legality import check_legal
from autopar.lower.program import make_program
from autopar.passes.split_stages import split_stages
from autopar.values.graph import CapturedModel
from autopar.values.placement import REPLICATE, Layout
from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan


def repointed(
    saved: ModelPlan,
    captured: CapturedModel,
    model: nn.Module,
    precision: str,
    planned: Callable[[], nn.Module],
) -> Plan:
    """The choices of a saved plan for `captured`.

    saved: a plan as read from its file.
    captured: the graph of `model` in `precision`.
    planned: makes the model in the plan's own precision.

    Raises:
        PlanMismatchError: if the graph differs in more than constants. It names the plan's precision if the plan is
            one of the model in that.
    """
    try:
        return _same_choices(saved.bind(model), captured)
    except PlanMismatchError:
        own = saved.config.precision
        if own == precision or not _is_plan_of(saved, planned):
            raise
        raise PlanMismatchError(
            f"the plan was made in {own}; in {precision}, in which verify was to compare, casts make the model's graph "
            f"another one, which the plan has no choices for; give --precision {own}"
        ) from None


def _is_plan_of(saved: ModelPlan, planned: Callable[[], nn.Module]) -> bool:
    try:
        saved.bind(planned())
    except AutoparError:
        return False
    return True


def _same_choices(plan: Plan, captured: CapturedModel) -> Plan:
    """The same choices for another precision's graph, whose nodes have the same names but for constants: a cast may be
    one in one precision and none in the other. Constants are whole on every rank.

    Raises:
        PlanMismatchError: if the graph differs in more than that.
    """
    plain = Plan(**{f.name: getattr(plan, f.name) for f in fields(Plan)})
    whole = Layout((REPLICATE,) * plan.mesh.num_axes)
    stages = list[StagePlan]()
    for stage, part in zip(plan.stages, split_stages(captured, plan.cuts), strict=True):
        held = {name: layout for name, layout in stage.layouts.items() if name in part.nodes}
        layouts = dict.fromkeys(part.constants, whole) | held
        stages.append(replace(stage, fingerprint=part.fingerprint, layouts=layouts))
        check_legal(make_program(part), stages[-1])
    return replace(plain, fingerprint=captured.fingerprint, stages=tuple(stages))
