"""`@autopar.auto_parallel(cluster=...)`: a model that behaves as before, can plan, and under torchrun is distributed.

In an ordinary process the class (or the one instance given) gains `plan(example_inputs)` and nothing else changes. In a
process that torchrun started, the first call of a model plans for the processes there are (rank 0 captures and plans,
the others receive both), and from then on calls, parameters and state are those of the distributed module.
"""

import gc
import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.api import check_choice, plan, values_of
from autopar.calls import Call, call_of
from autopar.cluster import Cluster, load_cluster, resized
from autopar.cost_models.memory import NUM_STATES
from autopar.errors import ArgumentError, AutoparError, BatchError, OptimizerError, RankError
from autopar.mesh import Mesh
from autopar.model_plan import ModelPlan, model_plan, plan_from_text

Model = TypeVar("Model")

DELEGATED = (
    *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict"),
    *("train", "eval", "zero_grad", "requires_grad_", "get_parameter"),
)
"""Methods that are the distributed module's, once there is one."""

_MODULE = "_autopar_module"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the decorator was told."""

    cluster: Any
    mesh: str | tuple[int, ...] | Mesh | None
    global_batch: int | None
    optimizer: str
    precision: str | None
    loss_fn: Callable[..., Any] | None
    memory_gb: float | None

    def plan(self, model: nn.Module, call: Call, **more: Any) -> ModelPlan:
        made = plan(
            model,
            call,
            cluster=self.cluster,
            mesh=self.mesh,
            pipeline=1,
            global_batch=self.global_batch,
            optimizer=self.optimizer,
            precision=self.precision,
            loss_fn=self.loss_fn,
            memory_gb=self.memory_gb,
            **more,
        )
        assert isinstance(made, ModelPlan)
        return made


def auto_parallel(
    target: Any = None,
    *,
    cluster: Any,
    mesh: str | tuple[int, ...] | Mesh | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    memory_gb: float | None = None,
) -> Any:
    """Decorate a class, or a model: `auto_parallel(model, cluster="4xcpu")`. Arguments are those of `autopar.plan`.

    The model gains `plan(example_inputs)` and `distribute(example_inputs)`. Under torchrun it plans for as many devices
    of the cluster's kind as there are processes. Make optimizers after the first call, or after
    `model.distribute(example_inputs)`.

    Raises:
        ArgumentError: if the target is neither a module class nor a module, or has methods of these names.
    """
    check_choice("optimizer", optimizer, NUM_STATES)
    settings = Settings(
        cluster=cluster,
        mesh=mesh,
        global_batch=global_batch,
        optimizer=optimizer,
        precision=precision,
        loss_fn=loss_fn,
        memory_gb=memory_gb,
    )
    return (lambda it: _decorated(it, settings)) if target is None else _decorated(target, settings)


def _decorated(target: Any, settings: Settings) -> Any:
    if isinstance(target, type) and issubclass(target, nn.Module):
        _equip(target, settings)
        return target
    if isinstance(target, nn.Module):
        # A class of its own, so that other models of the class stay as they are; `isinstance` holds as before.
        own = type(target)
        body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        equipped = type(own.__name__, (own,), body)
        _equip(equipped, settings)
        target.__class__ = equipped
        return target
    raise ArgumentError(f"auto_parallel decorates an nn.Module class or an nn.Module, not {type(target).__name__}")


def _equip(cls: Any, settings: Settings) -> None:
    """Give a class its two methods, and let calls and state go to the distributed module once there is one."""
    for name in ("plan", "distribute"):
        if hasattr(cls, name):
            raise ArgumentError(f"{cls.__name__} has a {name} of its own; use autopar.{name}(model, ...) instead")

    def plan_method(self: nn.Module, example_inputs: Any = None, *args: Any, **kwargs: Any) -> ModelPlan:
        """Plan for the cluster that the decorator named."""
        positions = (example_inputs, *args) if args else ()
        return settings.plan(self, call_of(None if args or kwargs else example_inputs, positions, kwargs))

    def distribute_method(self: nn.Module, example_inputs: Any) -> nn.Module:
        """Become the distributed module now, before the first call (an optimizer needs its parameters)."""
        if not _is_launched():
            raise ArgumentError("distribute works in processes that torchrun started; call plan(example_inputs) here")
        _distribute(self, call_of(example_inputs), settings)
        return self

    call = cls.__call__

    @wraps(call)
    def call_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.__dict__.get(_MODULE)
        if module is None:
            if not _is_launched() or torch.compiler.is_exporting():  # the capture calls the model too
                return call(self, *args, **kwargs)
            module = _distribute(self, Call(args=args, kwargs=kwargs), settings)
        return module(*args, **kwargs)

    cls.plan, cls.distribute, cls.__call__ = plan_method, distribute_method, call_method
    for name in DELEGATED:
        setattr(cls, name, _delegating(getattr(cls, name), name))


def _delegating(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def delegating(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.__dict__.get(_MODULE)
        result = method(self, *args, **kwargs) if module is None else getattr(module, name)(*args, **kwargs)
        return self if result is module and module is not None else result

    return delegating


def _is_launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _launched() -> tuple[int, int]:
    """Nodes, and processes of each."""
    world = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return (world // per_node, per_node) if world % per_node == 0 else (1, world)


def _distribute(model: nn.Module, call: Call, settings: Settings) -> nn.Module:
    """Plan once, on rank 0, and become the distributed module on every rank.

    Raises:
        OptimizerError: if an optimizer holds the parameters that are about to be replaced.
        BatchError: if the call is not of the global batch that the decorator names.
        RankError: on every rank, if ranks disagree.
    """
    import torch.distributed as dist

    from autopar.passes.insert_collectives import insert_collectives
    from autopar.runtime import DistributedModule, init
    from autopar.runtime.agreement import agree, failing_together

    init()
    with failing_together():
        _refuse_early_optimizers(model)
        if settings.global_batch is not None and call.batch() != settings.global_batch:
            raise BatchError(
                f"the decorator names global batch {settings.global_batch}, the call has {call.batch()} samples; call "
                "the model with the global batch on every rank"
            )
        agree(_facts(model, call))
    planned = _received(_plan_on_first_rank(model, call, settings), dist.get_rank())
    assert planned.captured is not None
    local = insert_collectives(planned.captured, planned)
    values = values_of(planned.captured, model)
    module = DistributedModule(local, values, bare=planned.call is not None and planned.call.bare)
    module.train(model.training)
    nn.Module.to(model, "meta")  # the distributed module holds its part; the whole is no longer needed
    model.__dict__[_MODULE] = module  # not a submodule: it would be a part of itself
    return module


def _plan_on_first_rank(model: nn.Module, call: Call, settings: Settings) -> bytes:
    """Rank 0's plan and captured graph (or its error) as bytes; empty on other ranks."""
    import torch.distributed as dist

    from autopar.serialize import dump

    if dist.get_rank() != 0:
        return b""
    try:
        machine = settings.cluster if isinstance(settings.cluster, Cluster) else load_cluster(settings.cluster)
        nodes, per_node = _launched()
        settings = replace(settings, cluster=resized(machine, nodes, per_node))
        planned = settings.plan(model, call, with_baselines=False)
        assert planned.captured is not None
        return pickle.dumps((planned.to_json(), dump(planned.captured)))
    except AutoparError as error:
        return pickle.dumps(error)


def _received(made: bytes, rank: int) -> ModelPlan:
    """Rank 0's plan on every rank.

    Raises:
        AutoparError: rank 0's error, on every rank.
    """
    import torch.distributed as dist

    from autopar.serialize import load

    boxes: list[Any] = [made]
    try:
        dist.broadcast_object_list(boxes, src=0, device=torch.device("cpu"))
    except RuntimeError as error:
        raise RankError(f"rank {rank}: no plan came from rank 0 ({error}); see rank 0's output") from error
    answer = pickle.loads(boxes[0])
    if isinstance(answer, AutoparError):
        raise answer
    text, graph = answer
    planned = plan_from_text(text)
    return model_plan(planned, captured=load(graph), call=planned.call, source=planned.source)


def _facts(model: nn.Module, call: Call) -> dict[str, str]:
    """What ranks must have in common before one of them plans for all."""
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters(remove_duplicate=False)]
    digest = hashlib.sha256(str(parameters).encode()).hexdigest()[:16]
    inputs = {path: tuple(tensor.shape) for path, tensor in call.tensors().items()}
    return {"parameters": f"{len(parameters)} ({digest})", "inputs": str(inputs)}


def _refuse_early_optimizers(model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for found in gc.get_objects():  # type(), not isinstance: lazy objects of other libraries wake up when asked
        if issubclass(type(found), torch.optim.Optimizer) and any(
            id(p) in own for group in found.param_groups for p in group["params"]
        ):
            raise OptimizerError(
                f"{type(found).__name__} was made before the model was distributed, so it would update parameters that "
                "are no longer used; call model.distribute(example_inputs) first, then make the optimizer"
            )
