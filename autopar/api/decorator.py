"""`@autopar.auto_parallel(cluster=...)`: a model that behaves as before, can plan, and under torchrun is distributed.

In an ordinary process the class (or the one instance given) gains `plan(example_inputs)` and nothing else changes. In a
process that torchrun started, the first call of a model plans for the processes there are (rank 0 captures and plans,
the others receive both), and from then on calls, parameters and state are those of the distributed module. A plan of
several micro-batches or with stages trains by `model.train_step(batch)`, as every distributed module does.
"""

import copy
import gc
import hashlib
import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.api.again import captor_of
from autopar.api.arguments import check_words, checked_numbers
from autopar.api.captures import values_of
from autopar.api.distributed_tree import ITSELF, MODULE, OWN, become, follow, hold, itself, take_over
from autopar.api.model_plan import ModelPlan, plan_from_text
from autopar.api.planning import distribute, plan
from autopar.errors import ArgumentError, AutoparError, BatchError, OptimizerError, RankError
from autopar.values.calls import Call, call_of
from autopar.values.choices import check_choice
from autopar.values.cluster import Cluster, load_cluster, resized
from autopar.values.plan import Plan

Model = TypeVar("Model")

DELEGATED = (
    *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict"),
    *("train", "eval", "zero_grad", "requires_grad_", "get_parameter", "get_buffer", "_apply"),
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
)
"""Methods that are the distributed module's, once there is one."""

METHODS = {
    "plan": "autopar.plan(model, ...)",
    "distribute": "autopar.distribute(model, plan)",
    "train_step": "autopar.distribute(model, plan).train_step(batch)",
    "clip_grad_norm_": "autopar.distribute(model, plan).clip_grad_norm_(max_norm)",
}
"""Methods that a decorated model gains, and what to use where it has one of that name."""

OPTIONS = tuple(n for n in inspect.signature(plan).parameters if n not in ("model", "example_inputs", "args", "kwargs"))
"""Keywords that the decorator takes: those of `autopar.plan` beside the model and a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the decorator was told."""

    options: Mapping[str, Any]

    @property
    def global_batch(self) -> int | None:
        return self.options.get("global_batch")

    def plan(self, model: nn.Module, call: Call, **more: Any) -> ModelPlan:
        return plan(model, call, **{**self.options, **more})


def auto_parallel(target: Any = None, *, cluster: Any, **options: Any) -> Any:
    """Decorate a class, or a model: `auto_parallel(model, cluster="4xcpu")`. Keywords are those of `autopar.plan`.

    The model gains `plan(example_inputs)`, `distribute(example_inputs)`, `train_step(batch)` and
    `clip_grad_norm_(max_norm)`. Under torchrun it plans for as many devices of the cluster's kind as there are
    processes; a plan in micro-batches or stages is trained by `train_step`, any other also by calling the model and
    `loss.backward()`. Make optimizers after the first call, or after `model.distribute(example_inputs)`.

    Raises:
        ArgumentError: for a keyword that `autopar.plan` lacks, or if the target is neither a module class nor a module,
            or has methods of these names.
    """
    for name in options:
        check_choice("keyword", name, OPTIONS)
    check_words(options)
    options |= checked_numbers(options)
    settings = Settings(options={**options, "cluster": cluster})
    return (lambda it: _decorated(it, settings)) if target is None else _decorated(target, settings)


def distribute_in_place(model: nn.Module, plan: Plan, **options: Any) -> nn.Module:
    """Let `model` itself become the module that trains it under `plan`, and keep its class and attributes.

    For loops that ask a model for more than calls and parameters.

    Args:
        model: as for `autopar.distribute`. One that is distributed is given back as it is.
        plan: from `autopar.plan` or `autopar.load_plan`.
        options: those of `autopar.distribute`.

    Raises:
        ArgumentError: if the model has methods of the names that a decorated model gains.
        Everything that `autopar.distribute` raises.
    """
    if MODULE in vars(model):
        return model
    _decorated(model, Settings(options={"cluster": plan.cluster}))
    with itself(model):
        module = distribute(model, plan, **options)
    become(model, module)
    return model


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
    """Give a class its methods, and let calls and state go to the distributed module once there is one."""
    for name, instead in METHODS.items():
        if hasattr(cls, name):
            raise ArgumentError(f"{cls.__name__} has a {name} of its own; use {instead} instead")

    def plan_method(self: nn.Module, example_inputs: Any = None, *args: Any, **kwargs: Any) -> ModelPlan:
        """Plan for the cluster that the decorator named."""
        positions = (example_inputs, *args) if args else ()
        return settings.plan(self, call_of(None if args or kwargs else example_inputs, positions, kwargs))

    def distribute_method(self: nn.Module, example_inputs: Any, *, compare_every: int | None = None) -> nn.Module:
        """Become the distributed module now, before the first call (an optimizer needs its parameters).

        compare_every: as of `autopar.distribute`.
        """
        if not _is_launched():
            raise ArgumentError("distribute works in processes that torchrun started; call plan(example_inputs) here")
        _distribute(self, call_of(example_inputs), settings).compare_every(compare_every)  # type: ignore[operator]
        return self

    def train_step_method(self: nn.Module, batch: Any) -> Tensor:
        """Forward and backward of the global batch; its loss."""
        module = self.__dict__.get(MODULE)
        if module is None and not _is_launched():
            raise ArgumentError(
                "train_step works in processes that torchrun started; here call the model and loss.backward()"
            )
        module = module or _distribute(self, call_of(batch), settings)
        follow(self)
        loss: Tensor = module.train_step(batch)  # type: ignore[operator]
        return loss

    def clip_method(self: nn.Module, max_norm: float) -> Tensor:
        """Scale gradients so that the norm of all, on all ranks, is at most `max_norm`; the norm before."""
        own = getattr(self.__dict__.get(MODULE), "clip_grad_norm_", None)
        norm: Tensor = own(max_norm) if own is not None else nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        return norm

    call, own_deepcopy = cls.__call__, getattr(cls, "__deepcopy__", None)

    @wraps(call)
    def call_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.__dict__.get(MODULE)
        if module is None:
            if not _is_launched() or self.__dict__.get(ITSELF):  # who captures calls the model too
                return call(self, *args, **kwargs)
            module = _distribute(self, Call(args=args, kwargs=kwargs), settings)
        follow(self)
        return module(*args, **kwargs)

    def deepcopy_method(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A model of its own, distributed if this is; all ranks copy together."""
        with itself(self) as module:
            if own_deepcopy is not None:
                made: nn.Module = own_deepcopy(self, memo)
            else:
                made = cls.__new__(cls)
                memo[id(self)] = made
                kept = {name: value for name, value in vars(self).items() if name not in OWN}
                made.__setstate__(copy.deepcopy(kept, memo))  # type: ignore[no-untyped-call]
        if module is not None:
            become(made, copy.deepcopy(module))
        return made

    def compiled(self: nn.Module) -> Any:
        """What `torch.compile(model)` asks for: of a distributed one the module says what to do instead."""
        if (module := self.__dict__.get(MODULE)) is None:
            raise AttributeError("_initialize_hook")
        return module._initialize_hook

    if not hasattr(cls, "_initialize_hook"):  # of lazy modules it is their own
        cls._initialize_hook = property(compiled)
    cls.plan, cls.distribute, cls.__call__ = plan_method, distribute_method, call_method
    cls.train_step, cls.clip_grad_norm_, cls.__deepcopy__ = train_step_method, clip_method, deepcopy_method
    for name in DELEGATED:
        setattr(cls, name, _delegating(getattr(cls, name), name))
    cls.__reduce_ex__ = _refusing_pickle(cls.__reduce_ex__)


def _delegating(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def delegating(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.__dict__.get(MODULE)
        if module is None:
            return method(self, *args, **kwargs)
        take_over(self)
        if name in ("train", "eval"):
            method(self, *args, **kwargs)  # its parts say in which mode they are
        result = getattr(module, name)(*args, **kwargs)
        if name in ("load_state_dict", "_apply"):
            hold(self, module)
        return self if result is module else result

    return delegating


def _refusing_pickle(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(reduce)
    def reduced(self: nn.Module, protocol: Any) -> Any:
        module = self.__dict__.get(MODULE)
        return reduce(self, protocol) if module is None else module.__reduce_ex__(protocol)

    return reduced


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

    from autopar.runtime import distributed_module, init
    from autopar.runtime.agreement import agree, failing_together

    init()
    with failing_together(), itself(model):
        _refuse_early_optimizers(model)
        if settings.global_batch is not None and call.batch() != settings.global_batch:
            raise BatchError(
                f"the decorator names global batch {settings.global_batch}, the call has {call.batch()} samples; call "
                "the model with the global batch on every rank"
            )
        agree(_facts(model, call))
    with itself(model):
        planned = _received(_plan_on_first_rank(model, call, settings), dist.get_rank())
    bare = planned.call is not None and planned.call.bare
    values = values_of(planned.graph, model)
    planned = replace(planned, call=replace(call, bare=bare), loss_fn=settings.options.get("loss_fn"))
    captor = captor_of(planned, model)
    module = distributed_module(planned.graph, planned, values, bare=bare, captor=captor)
    become(model, module)
    return module


def _plan_on_first_rank(model: nn.Module, call: Call, settings: Settings) -> bytes:
    """Rank 0's plan and captured graph (or its error) as bytes; empty on other ranks."""
    import torch.distributed as dist

    from autopar.values.serialize import dump

    if dist.get_rank() != 0:
        return b""
    try:
        named = settings.options["cluster"]
        machine = named if isinstance(named, Cluster) else load_cluster(named)
        nodes, per_node = _launched()
        planned = settings.plan(model, call, cluster=resized(machine, nodes, per_node), with_baselines=False)
        return pickle.dumps((planned.to_json(), dump(planned.graph)))
    except AutoparError as error:
        return pickle.dumps(error)


def _received(made: bytes, rank: int) -> ModelPlan:
    """Rank 0's plan on every rank.

    Raises:
        AutoparError: rank 0's error, on every rank.
    """
    import torch.distributed as dist

    from autopar.values.serialize import load

    boxes: list[Any] = [made]
    try:
        dist.broadcast_object_list(boxes, src=0, device=torch.device("cpu"))
    except RuntimeError as error:
        raise RankError(f"rank {rank}: no plan came from rank 0 ({error}); see rank 0's output") from error
    answer = pickle.loads(boxes[0])
    if isinstance(answer, AutoparError):
        raise answer
    text, graph = answer
    return replace(plan_from_text(text), captured=load(graph))


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
