"""How does a loss outside the model train like one inside? What a call returns waits for what is made of it.

In training a call returns tensors without values. What torch computes of them (a criterion, its mean, a scale) is
noted; when a value is asked for, or `backward()`, the model and all that was noted are captured as one graph, so that
logits stay split as they are where the loss is a part of the model. Afterwards the tensors have values: gathered whole
on every rank when one is read.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from autopar.errors import ArgumentError
from autopar.runtime.agreement import agree
from autopar.runtime.private_torch import is_made
from autopar.runtime.whole import as_whole, refuse_lost_gradients
from autopar.values.binding import constant_key
from autopar.values.inputs import taken_apart
from autopar.values.outputs import flatten_outputs


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the call, by number: first what the model returns, then what was computed."""

    number: int


@dataclass(frozen=True, slots=True)
class _Extra:
    """A tensor of the caller, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Noted:
    """A function of torch that was called. arguments: leaves of (args, kwargs), tensors as `_Value` and `_Extra`;
    form: which leaf stands where."""

    function: Any
    arguments: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]
    form: str
    gradients: bool

    def results(self, values: Sequence[Any], extras: Sequence[Tensor]) -> list[Tensor]:
        """What the function gives."""
        args, kwargs = self.rebuild([_filled(leaf, values, extras) for leaf in self.arguments])
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            return _tensors(self.function(*args, **kwargs))


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeferredCall:
    """A call that has not run.

    run: given what follows on the model's output and the caller's tensors, the values that are asked for, each as this
        rank has it.
    given: the call's own tensors, which nobody may change before it runs.
    """

    run: Callable[["Following", list[Tensor]], Sequence[Tensor]]
    device: torch.device
    given: Sequence[Tensor]
    autocast: object
    has_begun: bool = False
    num_returned: int = 0
    noted: list[_Noted] = field(default_factory=list)
    metas: list[Tensor] = field(default_factory=list)
    extras: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alive: dict[int, weakref.ref["Deferred"]] = field(default_factory=dict)
    values: dict[int, Tensor] | None = None
    wholes: dict[int, Tensor] = field(default_factory=dict)
    """Values that every rank has whole: what was gathered once, and may be written since."""
    own: set[int] = field(default_factory=set)
    """Those of them that nothing else shares."""
    is_eager: bool = False
    read: set[int] = field(default_factory=set)
    """Values that others were computed of before there were any."""
    _given: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._given = [tensor._version for tensor in self.given if not tensor.is_inference()]
        _waiting[id(self)] = self

    def new(self, meta: Tensor) -> "Deferred":
        """A tensor of the call that has no value yet."""
        number = len(self.metas)
        self.metas.append(meta)
        made = Deferred(self, number, meta)
        self.alive[number] = weakref.ref(made)
        return made

    def begin(self, metas: Sequence[Tensor]) -> list["Deferred"]:
        """What the model returns."""
        self.num_returned = len(metas)
        return [self.new(meta) for meta in metas]

    @property
    def wanted(self) -> tuple[int, ...]:
        """Which values the graph makes: what nothing else was computed of, whoever holds it (one rank may read what
        others have let go), and what else is held."""
        return tuple(number for number in range(len(self.metas)) if number not in self.read or self._is_held(number))

    def _is_held(self, number: int) -> bool:
        return self.alive[number]() is not None

    def finish(self, *, eagerly: bool = False) -> None:
        """Run the call, with what was noted in one graph; or `eagerly`, on its outputs, whole on every rank: what is
        written then, or watched, is seen as ever."""
        if self.values is not None:
            return
        if self.has_begun:
            raise ArgumentError("the call that this is of failed before; call the module again")
        self.has_begun = True
        given = [tensor for tensor in self.given if not tensor.is_inference()]
        watched = [*zip(self.extras, self.versions, strict=True), *zip(given, self._given, strict=True)]
        if any(tensor._version != version for tensor, version in watched):
            raise ArgumentError(
                "a tensor or parameter was changed in place between a call, or a loss, that reads it and backward(); "
                "change it afterwards"
            )
        noted = () if eagerly else tuple(self.noted)
        wanted = tuple(range(self.num_returned)) if eagerly else self.wanted
        found = self.run(Following(noted, self.num_returned, wanted), self.extras)
        if eagerly:
            values = [whole_of(value).clone() for value in found]
            for note in self.noted:
                values += note.results(values, self.extras)
            wanted, found, self.is_eager = tuple(range(len(values))), values, True
        self.values = {number: own for number, own in zip(wanted, found, strict=True) if self._is_held(number)}
        self.noted, self.metas, self.extras, self.given = [], [], [], []

    def whole(self, number: int) -> Tensor:
        """A value, the same tensor at every reading."""
        self.finish()
        assert self.values is not None
        if number not in self.wholes:
            self.wholes[number] = as_whole(whole_of(self.values[number]))
        return self.wholes[number]

    def opened(self, number: int, name: str) -> Tensor:
        """A value that is written, or whose gradient is watched, by the function `name`."""
        self.finish(eagerly=True)
        if not (self.is_eager or number in self.own):
            if number in self.read or number >= self.num_returned:
                raise ArgumentError(
                    f"{name} of an output, or of what was computed of one, after some of it was read, may not be seen "
                    "by the rest; do it before anything is read, or on a copy"
                )
            self.wholes[number] = self.whole(number).clone()
            self.own.add(number)
        return self.whole(number)


_waiting: weakref.WeakValueDictionary[int, DeferredCall] = weakref.WeakValueDictionary()


def finish_readers(changing: Iterable[Tensor]) -> None:
    """Run the calls that wait and read tensors that are about to change, in their order. (Those of a module that nobody
    holds any more wait until they are collected, which ranks do at different times.)"""
    known = {id(tensor) for tensor in changing}
    for call in list(_waiting.values()):
        if not call.has_begun and any(id(tensor) in known for tensor in call.given):
            call.finish()


@dataclass(frozen=True, slots=True)
class Following:
    """What follows on a model's output: calls that were noted, and which values are wanted in the end."""

    noted: tuple[_Noted, ...]
    num_returned: int
    wanted: tuple[int, ...]

    @property
    def key(self) -> object:
        """Equal for calls that compute the same."""
        plain = tuple(
            (note.function, note.form, tuple(map(constant_key, note.arguments)), note.gradients) for note in self.noted
        )
        return plain, self.num_returned, self.wanted

    def __call__(self, output: Any, extras: Sequence[Tensor]) -> list[Tensor]:
        values: list[Any] = list(flatten_outputs(output)[0])
        for note in self.noted:
            values += note.results(values, extras)
        return [values[number] for number in self.wanted]


class Deferred(Tensor):
    """A tensor of a call that may not have run; read, it is a whole tensor, the same on every rank."""

    call: DeferredCall
    number: int

    def __new__(cls, call: DeferredCall, number: int, meta: Tensor) -> "Deferred":
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, dtype=meta.dtype, device=call.device, requires_grad=meta.requires_grad
        )
        made.call, made.number = call, number
        return made

    def value(self) -> Tensor:
        """The tensor, on every rank the whole of it."""
        return self.call.whole(self.number)

    def shared(self) -> Tensor:
        """The tensor as ranks share it: a DTensor where they do, else plain."""
        self.call.finish()
        assert self.call.values is not None
        return self.call.wholes[self.number] if self.call.is_eager else self.call.values[self.number]

    def full_tensor(self) -> Tensor:
        """As a DTensor's."""
        return self.value()

    def to_local(self) -> Tensor:
        """As a DTensor's: this rank's part."""
        held = self.shared()
        return held.to_local() if isinstance(held, DTensor) else held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What comes here beside torch's functions reads values."""
        leaves, rebuild = taken_apart((args, kwargs or {}))
        args, kwargs = rebuild([leaf.value() if isinstance(leaf, Deferred) else leaf for leaf in leaves])
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        if name in _ABOUT or attribute in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name == "__repr__" and len(args[0].shape):  # often on one rank alone, where nothing can be gathered
            return f"{cls.__name__}(shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if name == "__iter__":
            return iter(torch.unbind(args[0]))
        leaves, rebuild = taken_apart((args, kwargs))
        calls = {id(leaf.call): leaf.call for leaf in leaves if isinstance(leaf, Deferred)}
        call = next(iter(calls.values()))
        _refuse(func, leaves)
        if len(calls) == 1 and call.values is None and not (name in _ENDS or attribute in _READS or _changes(name)):
            noted = _note(call, func, leaves, rebuild)
            if noted is not None:
                return noted
        if (name in _OPENS or _changes(name)) and args and isinstance(args[0], Deferred):
            args[0].call.opened(args[0].number, name)
        elif _changes(name) and args and isinstance(args[0], DTensor):
            args, kwargs = rebuild([leaf.value() if isinstance(leaf, Deferred) else leaf for leaf in leaves])
            with implicit_replication():
                return func(*args, **kwargs)
        args, kwargs = rebuild([whole_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        return as_whole(func(*args, **kwargs))


def whole_of(value: Tensor) -> Tensor:
    """A tensor that every rank has whole; one that ranks share out is gathered, by all of them together."""
    if isinstance(value, Deferred):
        return value.value()
    if not isinstance(value, DTensor):
        return value
    agree({"what is read": f"an output {tuple(value.shape)} that ranks share out, which all ranks read together"})
    return value.full_tensor()


def _refuse(func: Any, leaves: Sequence[Any]) -> None:
    """Raises ArgumentError for what would lose gradients."""
    refuse_lost_gradients(func, leaves)
    if any(isinstance(leaf, Deferred) and leaf.call.values is None and is_made(leaf) for leaf in leaves):
        raise ArgumentError(
            "an autograd.Function was applied to an output that has no value yet; apply it to output.full_tensor(), or "
            "make it a part of the model or of loss_fn"
        )


def _note(call: DeferredCall, func: Any, leaves: list[Any], rebuild: Callable[[list[Any]], Any]) -> Any:
    """The results of a function of what has no value, noted; None if it cannot be known without values."""
    if any(isinstance(leaf, DTensor) for leaf in leaves) or autocast_of(call.device) != call.autocast:
        return None
    numbers: list[Any] = []
    metas: list[Any] = []
    extras = list(call.extras)
    for leaf in leaves:
        if isinstance(leaf, Deferred):
            numbers.append(_Value(leaf.number))
            metas.append(call.metas[leaf.number])
        elif isinstance(leaf, Tensor):
            place = next((i for i, known in enumerate(extras) if known is leaf), len(extras))
            if place == len(extras):
                extras.append(leaf)
            numbers.append(_Extra(place))
            metas.append(leaf.detach().to("meta").requires_grad_(leaf.requires_grad))
        else:
            numbers.append(leaf)
            metas.append(leaf)
    try:
        args, kwargs = rebuild(metas)
        result = func(*args, **kwargs)
    except Exception:
        return None
    found = _tensors(result)
    if not found or len(found) != sum(isinstance(leaf, Tensor) for leaf in taken_apart(result)[0]):
        return None
    call.versions += [extra._version for extra in extras[len(call.extras) :]]
    call.extras = extras
    call.read.update(leaf.number for leaf in leaves if isinstance(leaf, Deferred))
    form = str(rebuild(list(range(len(leaves)))))
    call.noted.append(_Noted(func, tuple(numbers), rebuild, form, torch.is_grad_enabled()))
    made = iter([call.new(meta) for meta in found])
    parts, again = taken_apart(result)
    return again([next(made) if isinstance(part, Tensor) else part for part in parts])


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast region that is entered, None outside."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in taken_apart(result)[0] if isinstance(leaf, Tensor)]


def _filled(leaf: Any, values: Sequence[Any], extras: Sequence[Tensor]) -> Any:
    if isinstance(leaf, _Value):
        return values[leaf.number]
    return extras[leaf.number] if isinstance(leaf, _Extra) else leaf


def _changes(name: str) -> bool:
    """Whether a function writes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))


_PROPERTIES = {
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "ndim",
    "layout",
    "is_leaf",
    "is_meta",
    "is_sparse",
    "is_cuda",
}
_ABOUT = {"size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__", "nelement"}
"""Properties and functions whose answer needs no values."""
_OPENS = {"__setitem__", "register_hook", "retain_grad"}
_READS = {"grad", "grad_fn", "data"}
_ENDS = {
    *("backward", "item", "tolist", "numpy", "__repr__", "__format__", "__bool__", "__float__", "__int__", "__index__"),
    *("__contains__", "retain_grad", "register_hook", "__array__", "__setitem__", "__deepcopy__", "data_ptr"),
    *("allclose", "equal", "assert_close", "__reduce_ex__"),
}
"""Properties and functions that ask for values."""
