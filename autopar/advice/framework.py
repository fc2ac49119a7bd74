"""What can a framework express, and what is its software like?

A framework is a value: habits (fields of `TrainingConfig` that its software fixes), a space of degrees and policies,
and two functions between a configuration and the text that its users write.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.advice.config_file import Keys
from autopar.cost_models.training_config import TrainingConfig
from autopar.cost_models.transformer import TransformerShape
from autopar.errors import ArgumentError, MeshError
from autopar.values.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A data-parallel policy under the framework's own name.

    name: as its users say it. zero: ZeRO's level (Rajbhandari et al. 2020, arXiv:1910.02054). keep_gathered: parameters
    of level 3 stay gathered from forward to backward. hybrid: groups of ranks each hold all shards. alone: not beside
    tensor or context parallel ranks.
    """

    name: str
    zero: int
    keep_gathered: bool = False
    hybrid: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSpace:
    """Degrees and policies of a framework; what is not there is 1 or none.

    shardings: data-parallel policies. recompute: names of `TrainingConfig.recompute`, from the least work to the most.
    offload: names of `TrainingConfig.offload`, none the first.
    schedules: of pipelines, () where there are none; virtual_stages: numbers of stages of a pipeline rank.
    tensor, context, expert: whether it has these degrees. sequence_parallel: whether tensor parallel ranks split norms
    by sequence. even_layers: each stage has equally many, embedding and head counted as none or as one each.
    repeats_keys: more tensor parallel ranks than heads of keys each hold a copy of one. tensor_needs_llama: tensor
    parallel ranks for layers of Llama's kind alone, gated and without experts. precisions: of matrix products that what
    is written can ask for.
    """

    shardings: tuple[Sharding, ...]
    recompute: tuple[str, ...]
    schedules: tuple[str, ...] = ()
    virtual_stages: tuple[int, ...] = (1,)
    offload: tuple[str, ...] = ("none",)
    tensor: bool = True
    context: bool = False
    expert: bool = False
    sequence_parallel: bool = False
    even_layers: bool = False
    repeats_keys: bool = False
    tensor_needs_llama: bool = False
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a configuration is written for: a model by its name, and where it runs.

    layers: of the model, 0 if no stages are cut. layer_paths, layer_class: the lists that hold its equal layers, and
    their class, "" if it is not known.
    """

    cluster: Cluster
    model: str
    layers: int = 0
    layer_paths: tuple[str, ...] = ()
    layer_class: str = ""

    @property
    def devices_per_node(self) -> int:
        return self.cluster.levels[-1].size

    @property
    def nodes(self) -> int:
        return self.cluster.num_devices // self.devices_per_node

    def data_ranks(self, *degrees: int) -> int:
        """Data-parallel ranks beside others.

        Raises:
            MeshError: if the degrees do not divide the devices.
        """
        ranks = math.prod(degrees)
        if min(degrees) < 1 or self.cluster.num_devices % ranks:
            text = " x ".join(str(degree) for degree in degrees)
            raise MeshError(f"{text} model-parallel ranks do not divide {self.cluster.num_devices} devices")
        return self.cluster.num_devices // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerJob:
    """A transformer, and where it is trained.

    global_batch: samples a step. seq: tokens a sample. precision: of matrix products, a name of `TrainingConfig`.
    optimizer_states: floats a parameter that the optimizer keeps.
    """

    shape: TransformerShape
    cluster: Cluster
    global_batch: int
    seq: int
    precision: str = "bf16"
    optimizer_states: int = 2

    @property
    def site(self) -> Site:
        return Site(
            cluster=self.cluster, model=self.shape.name, layers=self.shape.layers, layer_paths=("model.layers",)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One file or command for a user to paste. name: of the file, or what it is. language: for a highlighter."""

    name: str
    text: str
    language: str


Fields = Mapping[str, object]
"""Fields of `TrainingConfig` that a user's own configuration states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework that people train with.

    name: on the command line. title: with the version that files are written for. habits: fields of `TrainingConfig`
    that hold of all its configurations, and `sources`, where each of them is read. write: the configuration as its
    users write it. read: what a user's own file says, None where that is a Python program, which is not run. notes:
    what the model of its costs leaves out. own_models: it trains the transformers that it has itself, and no other
    module.
    """

    name: str
    title: str
    habits: Mapping[str, object]
    sources: str
    space: FrameworkSpace
    write: Callable[[Site, TrainingConfig, Sharding], tuple[ConfigFile, ...]]
    read: Callable[[Keys, Site], Fields] | None
    notes: tuple[str, ...] = ()
    own_models: bool = False

    def config(self, **fields: object) -> TrainingConfig:
        """A configuration with this framework's habits where the fields do not say otherwise.

        Raises:
            AutoparError: as `TrainingConfig`.
        """
        return TrainingConfig(**{**self.habits, **fields})  # type: ignore[arg-type]

    def sharding_of(self, config: TrainingConfig) -> Sharding:
        """The policy that a configuration has.

        Raises:
            ArgumentError: if the framework has none such.
        """
        for sharding in self.space.shardings:
            if (sharding.zero, sharding.keep_gathered, sharding.hybrid) == (
                config.zero,
                config.keep_gathered,
                config.replicate > 1,
            ):
                return sharding
        known = ", ".join(s.name for s in self.space.shardings)
        raise ArgumentError(
            f"{self.name} has no policy with zero {config.zero}, keep_gathered {config.keep_gathered}, replicate "
            f"{config.replicate}; its policies are {known}"
        )
