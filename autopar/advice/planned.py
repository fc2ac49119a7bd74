"""Advice for a model of any kind, as a value: configurations of a framework that were priced as plans."""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.advice.framework import Framework, Sharding, Site
from autopar.cost_models.training_config import TrainingConfig
from autopar.values.cluster import Cluster


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
class ModelJob:
    """How a model of any kind is trained where. global_batch: samples a step. precision: of matrix products, bf16 or
    fp32. optimizer: as for `plan`."""

    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"

    @property
    def storage(self) -> str:
        """The precision of a plan: parameters are kept in float32."""
        return "bf16-mixed" if self.precision == "bf16" else self.precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdvice:
    """Configurations that fit, fastest first, and those that do not.

    own: the user's configuration, None without one. num_params: of the model. has_switch: the model recomputes
    where it is told to, by `gradient_checkpointing_enable()`. left_out: policies that no plan prices, and why.
    """

    framework: Framework
    site: Site
    job: ModelJob
    own: PlannedConfiguration | None
    num_params: int
    has_switch: bool
    best: tuple[PlannedConfiguration, ...]
    too_large: tuple[PlannedConfiguration, ...]
    left_out: tuple[str, ...]
