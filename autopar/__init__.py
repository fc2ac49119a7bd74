"""A compiler that decides how to train a PyTorch model on a cluster, proves how good that is, and rewrites the model.

    plan = autopar.plan(model, example_inputs, cluster="8xh100")
    print(plan); plan.export("out/")
    module = autopar.distribute(model, plan)      # under torchrun

Names are imported on first use, so that `import autopar` costs nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import distribute, plan
    from autopar.decorator import auto_parallel
    from autopar.model_plan import ModelPlan, load_plan
    from autopar.rules.registered import check_rule, register_rule
    from autopar.runtime.data import LocalBatch
    from autopar.search.timeline.weave import Overlap
    from autopar.staged_model_plan import StagedModelPlan

_HOMES = {
    "ModelPlan": "autopar.model_plan",
    "LocalBatch": "autopar.runtime.data",
    "Overlap": "autopar.search.timeline.weave",
    "StagedModelPlan": "autopar.staged_model_plan",
    "auto_parallel": "autopar.decorator",
    "check_rule": "autopar.rules.registered",
    "distribute": "autopar.api",
    "load_plan": "autopar.model_plan",
    "plan": "autopar.api",
    "register_rule": "autopar.rules.registered",
}

__all__ = [
    "LocalBatch",
    "ModelPlan",
    "Overlap",
    "StagedModelPlan",
    "auto_parallel",
    "check_rule",
    "distribute",
    "load_plan",
    "plan",
    "register_rule",
]


class _Package(ModuleType):
    """`autopar.plan` is the function, although importing the submodule of that name sets the attribute too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'autopar' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Package
