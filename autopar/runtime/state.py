"""What does a rank hold of a model? Parameters under their own names, and leaves that compute on them.

Parameters are DTensors. Where every rank has all of every parameter they are plain tensors, as under torch's
DistributedDataParallel: there is nothing that a DTensor would say, and an optimizer's step takes a fifth of the time.

A leaf is a plain tensor that shares storage with its parameter's local tensor, so what optimizers and checkpoints write
in place is what the graph reads, without a `to_local()` a step. Where compute has another dtype than storage (mixed
precision) a step computes on a local cast of it. Autograd's gradient of a leaf moves to the parameter's `grad`, stored
and typed as the parameter is.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import ArgumentError
from autopar.lower.legality import check_storage
from autopar.runtime.changes import FollowedParameter, check_buffer, keeps_watch, refuse_hooks
from autopar.runtime.lost_ranks import among_ranks
from autopar.runtime.parameters import (
    MARK,
    STAGE,
    has_name,
    local_part,
    padded_part,
    register_under,
    to_dtensor,
)
from autopar.runtime.private_torch import local_tensor, memory_of, stored_like
from autopar.values.graph import BufferSpec, ParameterSpec
from autopar.values.local_model import LocalModel
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, Shard


class State:
    """Parameters, buffers and constants of one module on one rank, by placeholder.

    plain: parameters are plain tensors, because every rank has all of them. is_stage: others train with it, and count
        on its gradients, even where all of its own parameters are frozen.
    """

    def __init__(
        self,
        local: LocalModel,
        rank: int,
        device_mesh: DeviceMesh,
        device: torch.device,
        *,
        plain: bool,
        is_stage: bool = False,
    ) -> None:
        self.local, self.is_stage = local, is_stage
        self.plain = plain
        self.mesh: Mesh = local.plan.mesh
        self.coordinate = self.mesh.coordinate(rank)
        self.device_mesh = device_mesh
        self.device = device
        self.stored: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}
        self._guarded: dict[str, tuple[int, int]] = {}
        self._bounds: list[FollowedParameter] = []
        self.specs = {spec.placeholder: spec for spec in local.captured.parameters}
        self.constants = {
            name: padded_part(value.to(device), self.layout(name), self.mesh, self.coordinate)
            for name, value in local.captured.constants.items()
        }

    def layout(self, placeholder: str) -> Layout:
        return self.local.plan.layouts[placeholder]

    def register(self, root: nn.Module, values: Mapping[str, Tensor], sync: bool) -> None:
        """Put this rank's part of `values` (whole tensors, by placeholder) on `root` under the original names.

        With `sync` the values are rank 0's, broadcast one at a time. What `root` has already (of another stage on this
        rank) is the same there.
        """
        tied: list[tuple[str, nn.Parameter]] = []
        for spec in self.local.captured.parameters:
            if has_name(root, spec.names[0]):
                continue
            parameter = self._parameter(spec, self._value(values[spec.placeholder].to(spec.storage), sync))
            register_under(root, spec.names[0], parameter)
            tied += [(name, parameter) for name in spec.names[1:]]
        for name, parameter in tied:  # after all first names, which say in which order modules stand
            register_under(root, name, parameter)
        for buffer in self.local.captured.buffers:
            if has_name(root, buffer.names[0]):
                continue
            held = self._value(values[buffer.placeholder], sync)
            held = without_value(held, self.device) if held.is_meta else own_copy(held, self.device)
            for name in buffer.names:
                register_under(root, name, held, buffer.persistent)

    def _value(self, value: Tensor, sync: bool) -> Tensor:
        value = value.detach()
        return value if value.is_meta or not sync else first_ranks_value(value, self.device)

    def _parameter(self, spec: ParameterSpec, whole: Tensor) -> nn.Parameter:
        layout = self.layout(spec.placeholder)
        check_storage(spec.names[0], spec.shape, layout, self.mesh, spec.trainable)
        part = local_part(whole, layout, self.mesh, self.coordinate)
        local = without_value(part, self.device) if part.is_meta else own_copy(part, self.device)
        return nn.Parameter(self.as_stored(spec, local), requires_grad=spec.trainable)

    def as_stored(self, spec: ParameterSpec, part: Tensor) -> Tensor:
        if self.plain:
            return part
        return to_dtensor(part, self.layout(spec.placeholder), spec.shape, self.mesh, self.device_mesh)

    def scattered(self, spec: ParameterSpec, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as the parameter is stored."""
        part = local_part(whole.detach(), self.layout(spec.placeholder), self.mesh, self.coordinate)
        return self.as_stored(spec, own_copy(part, self.device))

    def write(self, spec: ParameterSpec, whole: Tensor) -> None:
        """Write this rank's part of a new value of a parameter, which backward need not know."""
        part = local_part(whole.detach(), self.layout(spec.placeholder), self.mesh, self.coordinate)
        local_tensor(self.parameters[spec.placeholder].data).data.copy_(part)

    def fill(self, root: nn.Module, name: str, value: Tensor) -> bool:
        """Write this rank's part of a whole parameter or buffer; whether there is one of that name."""
        for spec in self.local.captured.parameters:
            if name in spec.names:
                held = root.get_parameter(name).data
                local_tensor(held).copy_(local_tensor(self.scattered(spec, value)))
                return True
        for buffer in self.local.captured.buffers:
            if name in buffer.names:
                root.get_buffer(name).copy_(value)
                return True
        return False

    def names_of(self, name: str) -> set[str]:
        """All names of the parameter or buffer of that name."""
        specs: list[ParameterSpec | BufferSpec] = [*self.local.captured.parameters, *self.local.captured.buffers]
        return {other for spec in specs if name in spec.names for other in spec.names}

    def bind(self, root: nn.Module) -> None:
        """Make leaves of the parameters that `root` has now; after anything that replaces parameters or their data."""
        specs, self._bounds = self.local.captured.parameters, []
        for spec in specs:
            parameter = root.get_parameter(spec.names[0])
            for name in spec.names[1:]:
                register_under(root, name, parameter)  # tied as before, whatever replaced it
            self.parameters[spec.placeholder] = parameter
        trains = self.is_stage or any(self.parameters[spec.placeholder].requires_grad for spec in specs)
        for spec in specs:
            self._bounds.append(self._bound(root, spec, needs_gradient=trains and spec.trainable))
        for buffer in self.local.captured.buffers:
            path, _, name = buffer.names[0].rpartition(".")
            self._buffers[buffer.placeholder] = root.get_submodule(path), name

    def _bound(self, root: nn.Module, spec: ParameterSpec, *, needs_gradient: bool) -> FollowedParameter:
        """A new leaf of a parameter; one that is frozen alone has a gradient that nobody keeps."""
        parameter = self.parameters[spec.placeholder]
        setattr(parameter, MARK, spec.names[0])
        setattr(parameter, STAGE, self.is_stage)
        leaf = local_tensor(parameter).detach().requires_grad_(needs_gradient)
        if needs_gradient:
            leaf.register_post_accumulate_grad_hook(_mover(self, spec.placeholder))  # type: ignore[no-untyped-call]
        self.stored[spec.placeholder] = leaf
        paths = (name.rpartition(".") for name in spec.names)
        return FollowedParameter(
            spec=spec,
            parameter=parameter,
            leaf=leaf,
            memory=memory_of(parameter),
            places=tuple((root.get_submodule(path)._parameters, name) for path, _, name in paths),
            is_wanted=parameter.dtype == spec.storage
            and leaf.device.type == self.device.type
            and (spec.trainable or not parameter.requires_grad),
        )

    def follow(self, root: nn.Module) -> None:
        """Compute on parameters and buffers as they are by now, whatever was done to them.

        Raises:
            ArgumentError: if it cannot be done.
        """
        for buffer in self.local.captured.buffers:
            owner, name = self._buffers[buffer.placeholder]
            check_buffer(buffer, owner._buffers.get(name))
        if any(bound.has_changed() for bound in self._bounds):
            for bound in self._bounds:
                bound.check(self.device)
            self.bind(root)

    def versions(self) -> list[int]:
        """Others once a parameter or buffer was written, but for what forward itself writes."""
        held = (self._buffers[spec.placeholder] for spec in self.local.captured.buffers if spec.mutated_by is None)
        buffers = (owner._buffers.get(name) for owner, name in held)
        return [p._version for p in self.parameters.values()] + [b._version for b in buffers if b is not None]

    def keep_watch(self, ends: Iterable[Tensor]) -> None:
        """Have a backward pass fail that begins after parameters were written."""
        keeps_watch(list(ends), weakref.ref(self), State.versions)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What a step computes on, by placeholder: with casts, whose gradients autograd casts back."""
        casts = {name: self.stored[name].to(spec.dtype) for name, spec in self.specs.items() if spec.stored is not None}
        return {**self.stored, **casts}

    @property
    def masters(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter that is stored in another than is computed on."""
        return {name: self.stored[name].dtype for name, spec in self.specs.items() if spec.stored is not None}

    def add_gradient(self, placeholder: str, gradient: Tensor) -> None:
        """Add to the gradient of a parameter, in the layout it is stored in."""
        _add(self.parameters[placeholder], gradient)

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What the graph's placeholders read, parameters and inputs excepted.

        Raises:
            PlanMismatchError: if a buffer that forward branches on has another value than when it was captured.
        """
        if self.local.captured.guards:
            self._check_guards()
        buffers = {spec.placeholder: self._buffer(spec) for spec in self.local.captured.buffers}
        return {**self.constants, **buffers}

    def _check_guards(self) -> None:
        """Look at guarded buffers, at each only where it was written or exchanged."""
        owners = {n: self._buffers[spec.placeholder] for spec in self.local.captured.buffers for n in spec.names}
        for guard in self.local.captured.guards:
            if guard.name in owners:  # in a pipeline it may be another stage's
                owner, name = owners[guard.name]
                held: Tensor = getattr(owner, name)
                if self._guarded.get(guard.name) != (id(held), held._version):
                    guard.check(held)
                    self._guarded[guard.name] = id(held), held._version

    def _buffer(self, spec: BufferSpec) -> Tensor:
        owner, name = self._buffers[spec.placeholder]
        value: Tensor = getattr(owner, name)
        # Autograd keeps batch norm's statistics for backward, and the step writes the new ones before that.
        value = value.clone() if spec.mutated_by else value
        layout = self.layout(spec.placeholder)
        if all_whole((layout,)):
            return value if value.layout is not torch.strided else value.contiguous()
        return padded_part(value, layout, self.mesh, self.coordinate)

    def gradient(self, placeholder: str) -> Tensor | None:
        """This rank's part of a parameter's gradient, None before any backward pass."""
        held = self.parameters[placeholder].grad
        return None if held is None else local_tensor(held)


def _mover(state: State, placeholder: str) -> Callable[[Tensor], None]:
    """A leaf's hook that hands its gradient to the parameter. It holds the state weakly, which holds the leaf: hooks
    are kept where no collector looks, and such a circle would never leave memory. (A parameter that is held weakly
    cannot be swapped for another, as `module.float()` does.)"""
    held = weakref.ref(state)

    def move(leaf: Tensor) -> None:
        gradient, own = leaf.grad, held()
        leaf.grad = None
        if gradient is None:  # what comes with a bucket comes later
            return
        if own is None:
            raise ArgumentError("the module of this loss was let go before backward; keep it until gradients are there")
        own.add_gradient(placeholder, gradient)

    return move


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    held = parameter.grad
    if not parameter.requires_grad:  # frozen since
        return
    refuse_hooks(parameter, getattr(parameter, MARK))
    if held is None:
        parameter.grad = stored_like(gradient.to(parameter.dtype), parameter)
    elif isinstance(parameter, DTensor) and not isinstance(held, DTensor):
        raise ArgumentError(
            f"the gradient of {getattr(parameter, MARK)}, which ranks share out, was replaced by a plain tensor; give "
            "a DTensor, as torch.zeros_like(parameter) is"
        )
    else:
        if isinstance(parameter, DTensor) and isinstance(held, DTensor) and held.placements != parameter.placements:
            parameter.grad = held = held.redistribute(placements=parameter.placements)  # of a penalty, as it came
        local_tensor(held).add_(gradient)


def all_whole(layouts: Iterable[Layout]) -> bool:
    """Whether every rank of a mesh has all of the parameters stored so."""
    return not any(isinstance(placement, Shard) for layout in layouts for placement in layout.axes)


def without_value(like: Tensor, device: torch.device) -> Tensor:
    """Memory for what has no value yet, which says so to whoever reads it: not a number, or the least there is."""
    made = torch.empty_like(like, device=device)
    if made.layout is not torch.strided or made.dtype == torch.bool:
        return made.zero_()
    is_number = made.dtype.is_floating_point or made.dtype.is_complex
    return made.fill_(torch.nan if is_number else torch.iinfo(made.dtype).min)


def own_copy(part: Tensor, device: torch.device) -> Tensor:
    if part.layout is not torch.strided:
        return part.to(device, copy=True)
    return part.to(device, copy=True, memory_format=torch.contiguous_format)


def first_ranks_value(value: Tensor, device: torch.device) -> Tensor:
    """Rank 0's value on every rank."""
    if dist.get_world_size() == 1:
        return value
    if value.layout is not torch.strided:
        held = [value]
        with among_ranks("taking rank 0's values"):
            dist.broadcast_object_list(held, src=0)
        return held[0].to(device)
    copy = own_copy(value, device)
    with among_ranks("taking rank 0's values"):
        dist.broadcast(copy.view(torch.uint8) if copy.dtype == torch.bool else copy, src=0)
    return copy
