"""What do modules under a plan share, whole or in stages? Values by original name, taken from whole tensors.

A state dict of the original model holds whole tensors; each rank takes its part of those it has, and leaves out those
that other stages of a pipeline have alone. One of a module under another plan may hold DTensors.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import ArgumentError
from autopar.ops.groups import Groups
from autopar.ops.random import Draws
from autopar.runtime.comparison import RankComparison, checked_interval
from autopar.runtime.data import LocalBatch, arguments_of
from autopar.runtime.parts import (
    Buffers,
    copy_hooks,
    refuse_change,
    refuse_removal,
    refuse_uncalled_hooks,
    seal,
    take_form,
)
from autopar.runtime.private_torch import local_tensor
from autopar.runtime.roll_call import RollCall
from autopar.runtime.state import State
from autopar.runtime.variant import GATHERED
from autopar.runtime.variants import Captor, Make, Variants
from autopar.values.graph import CapturedModel, InputSpec
from autopar.values.inputs import bind_inputs, flatten_inputs, taken_apart

DECORATED = "_autopar_module"
"""Where a decorated model holds the distributed module that it became."""


class NotWrapped:
    """What DistributedDataParallel asks a module for: says that a distributed module needs none around it."""

    def __iter__(self) -> NoReturn:
        raise ArgumentError(
            "a distributed module sums gradients over ranks itself; leave DistributedDataParallel out, call the module"
        )


@dataclass(frozen=True, slots=True)
class Output:
    """What a call returns: the loss of the global batch, a scalar on every rank."""

    loss: Tensor

    def backward(self) -> None:
        self.loss.backward()  # type: ignore[no-untyped-call]

    def item(self) -> float:
        return float(self.loss.detach())


class Trainable(nn.Module):
    """A module of which this rank holds `states`.

    uninitialized: names without a value yet. seed: of all random numbers. num_calls, num_evaluated: how many
    (micro-)batches were trained on and evaluated, which number what they draw.
    """

    takes_slices: ClassVar[bool] = True
    """Whether a rank may be given its slices of a batch."""
    pipeline_rank: int = 0

    uninitialized: set[str]
    seed: int
    num_calls: int
    num_evaluated: int
    groups: Groups
    exact_random: bool

    _empty: dict[str, tuple[Tensor, int]]
    _outputs: str
    _variants: Variants | None

    def __init__(self) -> None:
        super().__init__()
        self._comparison, self._roll_call = RankComparison(), RollCall()
        self._outputs, self._variants = GATHERED, None
        self.uninitialized, self._empty = set(), {}
        self.num_calls = self.num_evaluated = 0
        self.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this rank computes."""

    @property
    @abstractmethod
    def states(self) -> tuple[State, ...]:
        """What this rank holds of the model."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[InputSpec, ...]:
        """Inputs of the model."""

    @abstractmethod
    def step(self, inputs: Mapping[str, Tensor], *, is_local: bool = False) -> Tensor:
        """`train_step` for inputs by placeholder; is_local: they are this rank's slices."""

    def names_elsewhere(self) -> Iterable[str]:
        """Names of the original model that other ranks have alone."""
        return ()

    def receive_buffers(self) -> Iterable[Tensor]:
        """Buffers kept from step to step for what other stages send."""
        return ()

    def train_step(self, batch: Any) -> Tensor:
        """Forward and backward of the global batch, in the plan's micro-batches; its loss, without a graph.

        `batch` is a dict (keywords), a tuple (positions), one tensor, or this rank's slices of them as a `LocalBatch`;
        gradients are added to those there are.

        Raises:
            BatchError, ArgumentError: as a call.
        """
        refuse_uncalled_hooks(self)
        is_local = isinstance(batch, LocalBatch)
        args, kwargs = self.bound(*arguments_of(batch.batch if is_local else batch))
        self.compare_ranks(args, kwargs, is_local=is_local)
        return self.step(bind_inputs(self.inputs, args, kwargs), is_local=is_local)

    def _take_captor(self, captor: Captor | None, outputs: str, make: Make) -> None:
        """Run other calls than the planned one by what `make` makes of them; be in the modes of the model."""
        self._outputs = outputs
        if captor is not None:
            self._variants = Variants(captor, make)
            self.register_state_dict_pre_hook(lambda module, *_: module._variants.flush())  # type: ignore[no-untyped-call]
            take_form(self, captor.parts(), complete=not any(self.names_elsewhere()))
            for name, part in self.named_modules():
                part.training = self._variants.modes.get(name, True)
                part._buffers = Buffers(part._buffers, self.flush)
        seal(self)

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a call in the form in which the call was planned.

        Raises:
            ArgumentError: if the model does not take them, something has no value, or what was done to a parameter
                since the last call cannot be followed.
            RankError: if a rank died to which the plan sends nothing.
        """
        self.check_initialized()
        for state in self.states:
            state.follow(self)
        if torch.is_grad_enabled():
            self._roll_call.next_step(cast(Any, self).plan)
        return (args, dict(kwargs)) if self._variants is None else self._variants.captor.bound(args, kwargs)

    def compare_every(self, num_steps: int | None) -> None:
        """Compare ranks every so many training steps too, parameters included."""
        self._comparison.every = checked_interval(num_steps)

    def compare_ranks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_local: bool) -> None:
        """Count a training step on a batch, and see now and then that ranks train alike (`runtime.comparison`)."""
        if (due := self._comparison.count()) is not None:
            tensors = {path: leaf for path, leaf in flatten_inputs(args, kwargs)[0] if _has_values(leaf)}
            due.compare(tensors, self.inputs, self.states, is_local=is_local, pipeline_rank=self.pipeline_rank)

    def train(self, mode: bool = True) -> "Trainable":
        if self._variants is not None:
            self._variants.set_modes(mode)
        super().train(mode)
        return self

    def compile(self, *, backend: str = "inductor", by_block: bool = False) -> None:
        """Run under torch.compile from now on, where a module can.

        Raises:
            ArgumentError: if it cannot.
        """
        raise ArgumentError("a module in stages runs eagerly: torch's schedules call its stages; leave out compile()")

    def next_draws(self, count: int) -> list[Draws]:
        """The random numbers of the next (micro-)batches, which count from now on."""
        if self.training:
            first, self.num_calls = self.num_calls, self.num_calls + count
        else:
            self.num_evaluated += count
            first = -self.num_evaluated
        return [Draws(seed=self.seed, step=first + i, exact=self.exact_random) for i in range(count)]

    def flush(self) -> None:
        """Run a call that waits for what is made of it."""
        if self._variants is not None:
            self._variants.flush()

    @abstractmethod
    def _twin(self) -> "Trainable":
        """Another module of the same plan, without values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trainable":
        """A module of its own with the same values, for a moving average; all ranks copy together."""
        self.flush()
        twin = self._twin()
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        with torch.no_grad():
            for name, other in (*twin.named_parameters(), *twin.named_buffers()):
                local_tensor(other).copy_(local_tensor(own[name]))
        twin.lacks(self.still_empty())
        twin.num_calls, twin.num_evaluated = self.num_calls, self.num_evaluated
        for name, parameter in twin.named_parameters():
            nn.Parameter.requires_grad_(parameter, own[name].requires_grad)
        twin.bind()
        copy_hooks(self, twin)
        for name, part in twin.named_modules():
            part.training = self.get_submodule(name).training
        if self._variants is not None and twin._variants is not None:
            twin._variants.modes = dict(self._variants.modes)
        return twin

    def requires_grad_(self, requires_grad: bool = True) -> "Trainable":
        """Freeze all (a copy that teaches, or averages), or train again what was planned to be.

        Raises:
            ArgumentError: if a parameter would be trained that was not.
        """
        for spec in (spec for state in self.states for spec in state.specs.values()):
            if requires_grad and not spec.trainable:
                raise ArgumentError(
                    f"training {spec.names[0]} needs another plan; call requires_grad_ on the model before planning"
                )
        super().requires_grad_(requires_grad)
        self.bind()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        needing = (held.requires_grad for state in self.states for held in state.parameters.values())
        frozen = torch.is_grad_enabled() and not any(needing) and not _need_gradients((args, kwargs))
        with torch.no_grad() if frozen else nullcontext():
            return super().__call__(*args, **kwargs)

    _ddp_params_and_buffers_to_ignore = NotWrapped()

    @property
    def _initialize_hook(self) -> NoReturn:
        """What `torch.compile(module)` asks for: says what to do instead."""
        raise ArgumentError(
            "torch.compile around a distributed module cannot follow its messages; call module.compile()"
        )

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """As any module's, but that FSDP, which hooks in so, is refused.

        Raises:
            ArgumentError: for a hook of FSDP's.
        """
        if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
            raise ArgumentError("a distributed module shards its parameters itself; leave FSDP out, call the module")
        return super().register_forward_pre_hook(hook, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_change(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        refuse_removal(self, name)
        super().__delattr__(name)

    def refuse_autocast(self) -> None:
        """Raises ArgumentError in an autocast region, of which the planned step's graph knows nothing."""
        if torch.is_autocast_enabled(self.device.type):
            raise ArgumentError(
                "autocast around a step that was planned without it would compute in another precision; leave it out "
                "and plan with precision='bf16-mixed'"
            )

    def check_initialized(self) -> None:
        """Raises ArgumentError if a parameter or buffer has no value."""
        if not self.uninitialized or not (empty := self.still_empty()):
            return
        some = ", ".join(sorted(empty)[:3]) + (", ..." if len(empty) > 3 else "")
        if empty <= self._not_saved():
            raise ArgumentError(
                f"{len(empty)} buffers ({some}) have no value: the model was on the meta device, and no state dict or "
                "checkpoint has them (persistent=False); call autopar.runtime.reset_buffers(module, build), where "
                "build() makes the model on a real device, or write module.get_buffer(name).copy_(value)"
            )
        raise ArgumentError(
            f"{len(empty)} parameters and buffers ({some}) have no value: the model was on the meta device; call "
            "autopar.runtime.reset_parameters(module, model) or load a state dict first"
        )

    def lacks(self, names: Iterable[str]) -> None:
        """From now on these parameters and buffers have no value, until they are written."""
        self.uninitialized = set(names)
        held = self._held()
        self._empty = {name: (held[name], held[name]._version) for name in self.uninitialized}

    def still_empty(self) -> set[str]:
        """Those without a value: what was written in place or exchanged since has one."""
        held = self._held() if self.uninitialized else {}
        for name in list(self.uninitialized):
            own, version = self._empty[name]
            if held.get(name) is not own or own._version != version:
                self.uninitialized.discard(name)
        return self.uninitialized

    def _held(self) -> dict[str, Tensor]:
        """Parameters and buffers under all of their names."""
        return {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

    def _not_saved(self) -> set[str]:
        """Buffers that no state dict has."""
        specs = (spec for state in self.states for spec in state.local.captured.buffers)
        return {name for spec in specs if not spec.persistent for name in spec.names}

    def _apply(self, fn: Any, recurse: bool = True) -> "Trainable":
        empty = set(self.still_empty())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.lacks(empty)
        self.bind()
        return self

    def to_empty(self, **how: Any) -> "Trainable":
        """As any module's; afterwards nothing has a value."""
        super().to_empty(**how)
        self.lacks(self._held())
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises ArgumentError: a rank's part of a model cannot be pickled."""
        raise ArgumentError(
            "a distributed module is one rank's part of a model, with its connections to the others, and cannot be "
            "pickled; save module.state_dict(), or a checkpoint by autopar.runtime.save"
        )

    def bind(self) -> None:
        """Compute on the parameters that the module has now."""
        for state in self.states:
            state.bind(self)


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_meta


def _need_gradients(call: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in taken_apart(call)[0])


def without_values(captured: CapturedModel) -> dict[str, Tensor]:
    """Parameters and buffers by placeholder, on the meta device."""
    dtypes = {p.placeholder: (p.shape, p.storage) for p in captured.parameters}
    dtypes |= {b.placeholder: (b.shape, b.dtype) for b in captured.buffers}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in dtypes.items()}


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, Trainable)
    module.flush()
    for name in module.names_elsewhere():
        state_dict.pop(prefix + name, None)
    for state in module.states:
        for spec in state.specs.values():
            for name in spec.names:
                value = state_dict.get(prefix + name)
                if isinstance(value, DTensor) and state.plain:
                    state_dict[prefix + name] = value.full_tensor()
                elif isinstance(value, Tensor) and not isinstance(value, DTensor) and tuple(value.shape) == spec.shape:
                    state_dict[prefix + name] = state.scattered(spec, value)


def _after_load(module: nn.Module, _: Any) -> None:
    assert isinstance(module, Trainable)
    module.still_empty()
    module.bind()
