"""Which explicit configuration of a step? Degrees, batch, recompute, precision and the software's habits.

Ranks form a mesh (pp, replicate, dp / replicate, cp, tp), row-major: tensor parallel neighbours are neighbouring ranks,
stages are farthest apart, as in Megatron-LM and DeepSpeed. Expert parallel ranks are part of the data axis.
"""

from dataclasses import dataclass

from autopar.cost_models.transformer import TransformerShape, layer_parameters
from autopar.errors import ArgumentError, BatchError, MeshError
from autopar.values.choices import near
from autopar.values.domains import POSITIVE, checked_number

RECOMPUTE = ("none", "selective", "full", "op", "alternate")
ATTENTION = ("flash", "flash1", "fused", "unfused")
PRECISION = ("bf16", "fp16", "fp32", "fp8", "fp8-rowwise")
SCHEDULES = ("1f1b", "gpipe", "zb-1p", "zb-2p", "zbv")
OFFLOAD = ("none", "optimizer", "all")
FUSION = ("none", "norm", "all")
TENSOR_OVERLAP = ("none", "backward", "all")
ALIASES = {"microbatch": "micro_batch", "mbs": "micro_batch", "vpp": "virtual_stages", "sp": "sequence_parallel"}
"""What people call fields of `TrainingConfig` for short."""
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One step of training.

    recompute: none; selective (the attention core, Korthikanti et al. 2022); full (every layer from its input); op
    (every second matrix product and all else, attention kept: torchtitan's per-op policy); alternate (every second
    layer in full). attention: a flash kernel (version 2 or 1), or scores in memory with a fused or an unfused softmax.
    fusion: which memory-bound operations are one kernel each. schedule with `virtual_stages` above 1 is interleaved;
    zbv has two stages a rank, the first and the last on rank 0 (Qi et al. 2024).
    `main_grads`: gradients are summed in float32, `fused_grad_sum`: by the matrix products that make them.
    `overlap_*`: communication that runs beside compute (tensor parallel: none, all, or backward beside weight
    gradients).
    `split_pipe_activations`, `split_pipe_gradients`: tensor parallel ranks each send their part to the next stage and
    to the one before; otherwise each sends all. `separate_gate`: gate and up are two products, each of which sums the
    gradient of its input over tensor parallel ranks by itself.
    `blocking_launches`: the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1). `gathered_logits`: tensor parallel
    ranks gather the logits instead of computing the loss on their part of the vocabulary. `in_place_loss`: the loss
    overwrites its float32 logits (Megatron-LM), instead of keeping them, their softmax and two gradients (torch).
    `fused_products`: queries, keys and values are one matrix product, gate and up another. `regather_inputs`: sequence
    parallel ranks keep their part of a product's input and gather it again for weight gradients (Megatron-LM), instead
    of keeping what they gathered. `master_copies`: 16-bit parameters have a float32 copy, gradient sum and states, and
    gradients are clipped; without, the optimizer's state has the parameters' precision, as torch's optimizers keep it.
    `replicate`: of the data-parallel ranks, groups that each hold all of what ZeRO shards, as in torch's HSDP: shards
    are gathered inside a group, gradients summed over groups too. `keep_gathered`: parameters gathered by ZeRO-3 stay
    until their backward (FSDP2's `reshard_after_forward=False`).
    `offload`: what the host's memory holds and its processors update: the optimizer's state and master copies, or all
    of a ZeRO-3 rank's shards.
    `per_tensor_exchange`: each parameter is gathered and each gradient sent by itself, as plans do, not in buckets.
    `deepspeed_zero3`: ZeRO-3 as DeepSpeed of 2021, not FSDP2: a collective a weight instead of one a layer, into a list
    of as many tensors as ranks; what a recomputed forward gathers is released before its backward. `whole_gradients`:
    ZeRO-1 sums all gradients on every rank, who then updates a part. `float32_exchange`: 16-bit gradients are sent in
    float32.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    zero: int = 0
    replicate: int = 1
    keep_gathered: bool = False
    offload: str = "none"
    sequence_parallel: bool = False
    micro_batch: int
    global_batch: int
    seq: int
    recompute: str = "none"
    precision: str = "bf16"
    attention: str = "flash"
    fusion: str = "all"
    schedule: str = "1f1b"
    main_grads: bool = True
    overlap_data: bool = False
    overlap_tensor: str = "none"
    split_pipe_activations: bool = True
    split_pipe_gradients: bool = True
    fused_grad_sum: bool = False
    blocking_launches: bool = False
    gathered_logits: bool = False
    in_place_loss: bool = True
    fused_products: bool = True
    regather_inputs: bool = True
    master_copies: bool = True
    per_tensor_exchange: bool = False
    separate_gate: bool = False
    deepspeed_zero3: bool = False
    whole_gradients: bool = False
    float32_exchange: bool = False
    optimizer_states: int = 2

    def __post_init__(self) -> None:
        for field in (
            "tp",
            "pp",
            "dp",
            "cp",
            "ep",
            "replicate",
            "virtual_stages",
            "micro_batch",
            "global_batch",
            "seq",
        ):
            checked_number(field, getattr(self, field), POSITIVE)
        for field, known in (
            ("recompute", RECOMPUTE), ("attention", ATTENTION), ("precision", PRECISION),
            ("schedule", SCHEDULES), ("fusion", FUSION), ("zero", (0, 1, 2, 3)), ("overlap_tensor", TENSOR_OVERLAP),
            ("offload", OFFLOAD),
        ):  # fmt: skip
            if (value := getattr(self, field)) not in known:
                names = [str(one) for one in known]
                raise ArgumentError(f"{field} {value!r} is not one of {', '.join(names)}{near(str(value), names)}")
        if self.global_batch % (self.dp * self.micro_batch):
            raise BatchError(
                f"global batch {self.global_batch} is not divisible by {self.dp} data-parallel ranks x micro-batch "
                f"{self.micro_batch}; use a multiple of {self.dp * self.micro_batch}"
            )
        if self.dp % self.ep:
            raise MeshError(f"ep {self.ep} does not divide dp {self.dp}; experts are spread over data-parallel ranks")
        if self.dp % self.replicate:
            raise MeshError(f"replicate {self.replicate} does not divide dp {self.dp}, whose ranks it groups")
        if self.replicate > 1 and not self.zero:
            raise ArgumentError(f"replicate {self.replicate} groups the ranks that ZeRO shards over, but zero is 0")
        if self.offload == "all" and self.zero != 3:
            raise ArgumentError(f"offload all is of shards that ZeRO-3 makes, but zero is {self.zero}")
        for field, zero in (("deepspeed_zero3", 3), ("keep_gathered", 3), ("whole_gradients", 1)):
            if getattr(self, field) and self.zero != zero:
                raise ArgumentError(f"{field} is for zero {zero}, but zero is {self.zero}")
        if self.seq % self.cp:
            raise MeshError(f"cp {self.cp} does not divide seq {self.seq}")
        if self.virtual_stages > 1 and (self.pp == 1 or self.schedule != "1f1b"):
            raise ArgumentError(f"virtual_stages {self.virtual_stages} need pp above 1 and schedule 1f1b")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def chunks(self) -> int:
        """Stages of a pipeline rank."""
        return 2 if self.schedule == "zbv" else self.virtual_stages

    @property
    def head_rank(self) -> int:
        """The pipeline rank that has the model's end."""
        return 0 if self.schedule == "zbv" else self.pp - 1

    @property
    def tokens(self) -> int:
        """Tokens that one rank of a tensor-parallel group works on in one micro-batch."""
        return self.micro_batch * self.seq // self.cp

    @property
    def shards(self) -> int:
        """Ranks that ZeRO shards over."""
        return self.dp * self.cp // self.replicate if self.zero else 1

    @property
    def mesh_shape(self) -> tuple[int, int, int, int, int]:
        return (self.pp, self.replicate, self.dp // self.replicate, self.cp, self.tp)


def check_fits(shape: TransformerShape, config: TrainingConfig) -> None:
    """Raise unless the configuration's degrees divide what they split.

    Raises:
        MeshError: naming the degree, the size, and what would do.
    """
    for degree, size, what in (
        (config.tp, shape.heads, "heads"),
        (config.tp, shape.ffn, "ffn"),
        (config.ep, shape.experts, "experts"),
    ):
        if size % degree:
            raise MeshError(
                f"{'ep' if what == 'experts' else 'tp'} {degree} does not divide {size} {what} of {shape.name}"
            )
    if config.pp * config.chunks > shape.layers + 2:
        raise MeshError(
            f"pp {config.pp} x virtual stages {config.chunks} is more than {shape.layers} layers of {shape.name}"
        )


def param_nbytes(config: TrainingConfig) -> int:
    """Bytes of a parameter or an activation as it is used and sent."""
    return 4 if config.precision == "fp32" else 2


def grad_nbytes(config: TrainingConfig) -> int:
    """Bytes of a gradient as it is summed and sent."""
    return 4 if config.main_grads or config.precision == "fp32" else 2


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage: equal; else, where layers + 2 divide, one less at both ends, whose room the embedding and
    the head take (BLOOM, zero-bubble); else as even as can be, the first stages holding one more."""
    if layers % pp and pp > 2 and (layers + 2) % pp == 0:
        each = (layers + 2) // pp
        return (each - 1, *[each] * (pp - 2), each - 1)
    return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))


def rank_layers(shape: TransformerShape, config: TrainingConfig) -> tuple[int, ...]:
    """Layers of each pipeline rank: `stage_layers`; of zbv as even as can be, the last ranks holding one more, for the
    first has embedding and head."""
    if config.schedule != "zbv":
        return stage_layers(shape.layers, config.pp)
    each, rest = divmod(shape.layers, config.pp)
    return tuple(each + (rank >= config.pp - rest) for rank in range(config.pp))


def stage_params(shape: TransformerShape, config: TrainingConfig, stage: int) -> float:
    """Parameters of one rank of a pipeline rank's stages, before any sharding over data-parallel ranks."""
    layers = rank_layers(shape, config)[stage]
    table = shape.vocab * shape.hidden / config.tp
    total = layers * float(sum(count for count, _ in layer_parameters(shape, config.tp, config.ep)))
    if stage == 0:
        total += table + shape.positions * shape.hidden
    if stage == config.head_rank:
        total += shape.norm_vectors * shape.hidden + (0 if shape.tied and stage == 0 else table)
    return total
