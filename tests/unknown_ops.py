"""Ops that nobody wrote a rule for, made for a test: functions of torch under names of a library of their own."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tests.op_sample import Input, Sample, X

LIBRARY = torch.library.Library("unknown_ops", "DEF")


def unknown(function: Callable[..., Any]) -> Any:
    """The op that is this function of tensors, which autograd goes into."""
    name = f"{function.__name__.strip('_<>')}{len(LIBRARY._op_defs)}"
    arguments = ", ".join(f"Tensor {p}" for p in inspect.signature(function).parameters)
    LIBRARY.define(f"{name}({arguments}) -> Tensor")
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.unknown_ops, name).default


def on(target: Any, *shapes: tuple[int, ...]) -> Sample:
    """A call of it."""
    inputs = tuple(Input(shape=shape) for shape in shapes)
    return Sample(name="", target=target, args=tuple(map(X, range(len(shapes)))), inputs=inputs)
