"""Is a rewritten graph right? Every node's operands have the layouts its rule asks for, and every call fits its shapes.

The second check runs each call on the meta device with local shapes: what it returns must be the local shape that the
layouts promise. Collectives and bodies need processes, so their promise is checked by the layouts alone.
"""

import operator

import torch
from torch import fx

from autopar.errors import PassError
from autopar.rules.registry import rule_of
from autopar.rules.rule import choices, layouts
from autopar.values.graph import operands, requires_grad
from autopar.values.local_model import LocalModel
from autopar.values.placement import INVARIANT
from autopar.values.stage_plan import StagePlan


def verify_local(local: LocalModel) -> None:
    """Raises PassError, naming the node, what its rule expects and what it got."""
    for node in local.graph.nodes:
        if node.op == "call_function" and "step" in node.meta:
            _check_step(node)
        elif node.op == "call_function" and node.name in local.plan.choices:
            _check_call(node, local.plan)
        elif node.op == "output" and local.captured.loss:
            loss = operands(node)[0]
            if any(p != INVARIANT for p in loss.meta["layouts"][0].axes) and requires_grad(loss):
                raise PassError(f"the loss {loss.name} is {loss.meta['layouts'][0]}; rule: Invariant on every axis")
        if isinstance(node.target, torch._ops.OpOverload):
            _check_shape(node)


def _check_step(node: fx.Node) -> None:
    step = node.meta["step"]
    got = operands(node)[0].meta["layouts"][0]
    if got != step.source or node.meta["layouts"][0] != step.target:
        raise PassError(f"{node.name}: a step {step.source} -> {step.target} got {got}")


def _check_call(node: fx.Node, plan: StagePlan) -> None:
    origin = node.meta["origin"]
    offered = {c.name: c for c in choices(rule_of(origin))}
    choice = tuple(offered[name] for name in plan.choices[node.name])
    grads = tuple(requires_grad(s) for s in operands(origin))
    wanted, given = layouts(choice, grads, (requires_grad(origin),) * len(node.meta["layouts"]))
    got = tuple(s.meta["layouts"][0] for s in operands(node))
    if got != wanted or given != node.meta["layouts"]:
        raise PassError(
            f"{node.name} split by {plan.choices[node.name]}: its rule expects operands {[str(w) for w in wanted]} and "
            f"results {[str(g) for g in given]}, got {[str(g) for g in got]} and "
            f"{[str(g) for g in node.meta['layouts']]}"
        )


def _check_shape(node: fx.Node) -> None:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    if node.target is operator.getitem:
        return
    assert callable(node.target)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    try:
        value = node.target(*args, **kwargs)
    except NotImplementedError:  # no meta kernel says so
        return
    except (RuntimeError, IndexError, ValueError) as error:
        raise PassError(f"{node.name} does not run on its local shapes: {error}") from error
    if isinstance(value, torch.Tensor) and value.device.type == "meta" and value.shape != node.meta["val"].shape:
        raise PassError(
            f"{node.name} returns {tuple(value.shape)} on a rank; its layout {node.meta['layouts'][0]} of "
            f"{node.meta['global'][0]} expects {tuple(node.meta['val'].shape)}"
        )
