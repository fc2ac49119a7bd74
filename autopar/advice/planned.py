"""Advice for a model of any kind, as a value: configurations of a framework that were priced as plans."""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.advice.framework import Framework, Sharding, Site
from autopar.cost_models.training_config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedConfiguration:
    """A configuration of a framework and its plan's figures.

    words: the named configuration that was planned. seconds: of a step. nbytes: of the fullest rank. fits: within the
    device's memory. memory: bytes by kind at the peak.
    """

    config: TrainingConfig
    sharding: Sharding
    words: str
    seconds: float
    nbytes: float
    fits: bool
    memory: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdvice:
    """Configurations that fit, fastest first, and those that do not.

    num_params: of the model. precision: of matrix products, as in `TrainingConfig`. has_switch: the model recomputes
    where it is told to, by `gradient_checkpointing_enable()`. left_out: policies that no plan prices, and why.
    """

    framework: Framework
    site: Site
    num_params: int
    precision: str
    has_switch: bool
    best: tuple[PlannedConfiguration, ...]
    too_large: tuple[PlannedConfiguration, ...]
    left_out: tuple[str, ...]
