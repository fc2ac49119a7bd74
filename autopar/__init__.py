"""A compiler that decides how to train a PyTorch model on a cluster, proves how good that is, and rewrites the model.

    plan = autopar.plan(model, example_inputs, cluster="8xh100")
    print(plan); plan.export("out/")
    module = autopar.distribute(model, plan)      # under torchrun

Names are imported on first use, so that `import autopar` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api.decorator import auto_parallel
    from autopar.api.model_plan import ModelPlan, load_plan
    from autopar.api.planning import distribute, plan
    from autopar.rules.check_registered import check_rule
    from autopar.rules.registered import register_rule
    from autopar.runtime.data import LocalBatch
    from autopar.search.timeline.weave import Overlap

_HOMES = {
    "ModelPlan": "autopar.api.model_plan",
    "LocalBatch": "autopar.runtime.data",
    "Overlap": "autopar.search.timeline.weave",
    "auto_parallel": "autopar.api.decorator",
    "check_rule": "autopar.rules.check_registered",
    "distribute": "autopar.api.planning",
    "load_plan": "autopar.api.model_plan",
    "plan": "autopar.api.planning",
    "register_rule": "autopar.rules.registered",
}

__all__ = [
    "LocalBatch",
    "ModelPlan",
    "Overlap",
    "auto_parallel",
    "check_rule",
    "distribute",
    "load_plan",
    "plan",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
