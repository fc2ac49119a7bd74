"""What each framework can express, how its software works, and how its configurations are written and read."""

from autopar.advice.framework import Framework
from autopar.advice.frameworks.accelerate import ACCELERATE
from autopar.advice.frameworks.deepspeed import DEEPSPEED
from autopar.advice.frameworks.lightning import LIGHTNING
from autopar.advice.frameworks.megatron import MEGATRON
from autopar.advice.frameworks.plain import PLAIN
from autopar.advice.frameworks.torchtitan import TORCHTITAN
from autopar.advice.frameworks.trainer import TRAINER
from autopar.errors import ArgumentError

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework for framework in (TORCHTITAN, ACCELERATE, TRAINER, MEGATRON, DEEPSPEED, LIGHTNING, PLAIN)
}


def framework_named(name: str) -> Framework:
    """The framework of that name.

    Raises:
        ArgumentError: if there is none.
    """
    if name not in FRAMEWORKS:
        raise ArgumentError(f"--for {name} is not one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
