"""How much memory does a step of an explicit configuration take on its fullest rank, and what takes it?

Live intervals over five moments of a step (forward of the micro-batch that fills the pipeline, its loss, its first
layer's backward, gradients in exchange, the optimizer); the peak is the most at any of them, over all stages. A stage
holds as many micro-batches as its schedule keeps in flight: p - i under 1F1B, m under GPipe, up to 2(p - i) - 1 with
ZB-H2, and interleaved 2(p - 1 - i) + (v - 1) p + 1 of its v chunks (Narayanan et al. 2021; Korthikanti et al. 2022);
under zbv what its order holds between forward and the gradients of weights, each in half of the rank's layers.

Three quantities go by the name of memory. `allocated_nbytes` is what tensors take, each in blocks of 512 bytes
(PyTorch's CUDACachingAllocator). What the allocator holds and what nvidia-smi shows is more: `RESERVES` has the rest.
The allocator's free pieces are left by what comes and goes; what lasts from step to step is laid down once. NCCL keeps
buffers for each communicator, 9.2 MiB a channel and neighbour for its three protocols (DEFAULT_*BUFFSIZE, init.cc): 0.9
GB for 16 channels of a ring and a tree. NVIDIA/nccl issue 864 saw 1.6 GB with one communicator, 6 GB with three.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.activation_memory import layer_nbytes, layer_tensors
from autopar.cost_models.memory import Interval, peak
from autopar.cost_models.schedules import make_order
from autopar.cost_models.training_config import TrainingConfig, grad_nbytes, param_nbytes, rank_layers, stage_params
from autopar.cost_models.transformer import TransformerShape, expert_params, layer_params

FORWARD, LOSS, BACKWARD, EXCHANGE, OPTIMIZER, END = range(6)
BLOCK = 512

# Beyond allocated memory: a part of what comes and goes (the allocator's free pieces); bytes (CUDA context and kernels,
# cuBLAS workspaces); bytes a kind of group that communicates. Parts and bytes are assumed, of the size that users see.
RESERVES = {"allocated": (0.0, 0.0, 0.0), "reserved": (0.06, 0.0, 0.0), "nvidia-smi": (0.06, 4e9, 1e9)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Of the fullest rank: peak bytes allocated, those that last from step to step, the stage, and bytes by kind at the
    moment of the peak. `group_kinds`: of tensor, pipeline and data parallel groups, how many it is in."""

    allocated_nbytes: int
    lasting_nbytes: int
    group_kinds: int
    stage: int
    kinds: tuple[tuple[str, int], ...]

    def with_reserve(self, name: str) -> float:
        """Bytes including a named reserve: allocated, reserved, or nvidia-smi."""
        part, nbytes, each_group = RESERVES[name]
        pieces = part * (self.allocated_nbytes - self.lasting_nbytes)
        return self.allocated_nbytes + pieces + nbytes + each_group * self.group_kinds


def step_memory(shape: TransformerShape, config: TrainingConfig) -> StepMemory:
    """The peak over all stages and moments."""
    group_kinds = sum(size > 1 for size in (config.tp, config.pp, config.dp * config.cp))
    best: StepMemory | None = None
    for stage in range(config.pp):
        named = stage_intervals(shape, config, stage)
        intervals = [i for _, i in named]
        top = peak(intervals)
        if best is None or top.nbytes > best.allocated_nbytes:
            kinds = tuple((named[k][0], named[k][1].nbytes) for k in top.contributors if named[k][1].nbytes)
            lasting = sum(i.nbytes for i in intervals if (i.start, i.end) == (FORWARD, END))
            best = StepMemory(
                allocated_nbytes=top.nbytes, lasting_nbytes=lasting, group_kinds=group_kinds, stage=stage, kinds=kinds
            )
    assert best is not None
    return best


def in_flight(config: TrainingConfig, stage: int) -> float:
    """Micro-batches whose activations a stage holds at most, counted in whole stages."""
    p, m, v = config.pp, config.num_microbatches, config.virtual_stages
    if config.schedule == "gpipe":
        return float(m)
    if config.schedule == "zbv":
        now = np.cumsum([{"F": 1, "I": 0, "W": -1}[action.kind] for action in make_order("zbv", p, m, 2).ranks[stage]])
        return float(now.max()) / 2
    if v > 1:
        return min(m * v, 2 * (p - 1 - stage) + (v - 1) * p + 1) / v
    if config.schedule == "zb-2p":
        return float(min(m, 2 * p - 1))
    if config.schedule == "zb-1p":
        return float(min(m, p))
    return float(min(m, p - stage))


def stage_intervals(shape: TransformerShape, config: TrainingConfig, stage: int) -> list[tuple[str, Interval]]:
    """Named live intervals of one rank of a stage."""
    layers = rank_layers(shape, config)[stage]
    found = _state(shape, config, stage)
    hidden = config.tokens * shape.hidden * param_nbytes(config)
    split = config.tp if config.sequence_parallel else 1
    flights = in_flight(config, stage)
    kept = layer_nbytes(shape, config)
    found.append(_named("saved activations", FORWARD, EXCHANGE, flights * layers * kept))
    if stage == 0 and shape.dropout:
        found.append(_named("embedding dropout", FORWARD, EXCHANGE, flights * config.tokens * shape.hidden / split))
    if config.pp > 1:
        found.append(_named("pipeline buffers", FORWARD, EXCHANGE, 2 * hidden / split))
    if stage == config.head_rank:
        found += _head(shape, config)
    found.append(_named("working space", BACKWARD, EXCHANGE, _working(shape, config)))
    return found


def _state(shape: TransformerShape, config: TrainingConfig, stage: int) -> list[tuple[str, Interval]]:
    """Parameters, gradients, master copies and optimizer state; with ZeRO-3 the gathered copies of two layers."""
    params = stage_params(shape, config, stage)
    weights, grads, states = (config.shards if config.zero >= level else 1 for level in (3, 2, 1))
    # ZeRO-3 shards hold the float32 parameters themselves, unless the host does
    wide = config.zero == 3 and config.master_copies and config.offload == "none"
    full = 4 if wide else param_nbytes(config)
    state = 4 if config.master_copies else full
    optimizer = 0 if config.offload != "none" else 1
    shards = 0 if config.offload == "all" else 1
    master = 4 * optimizer if config.master_copies and full != 4 else 0
    found = [
        _named("parameters", FORWARD, END, shards * full * params / weights),
        _named("gradients", FORWARD, END, shards * (4 if wide else grad_nbytes(config)) * params / grads),
        _named("master copies", FORWARD, END, master * params / states),
        _named("optimizer state", FORWARD, END, optimizer * state * config.optimizer_states * params / states),
    ]
    if config.main_grads and not config.fused_grad_sum and config.zero < 3 and config.precision != "fp32":
        found.append(_named("16-bit gradients", FORWARD, END, param_nbytes(config) * params / grads))
    if grad_nbytes(config) == 2 and config.master_copies:
        found.append(_named("float32 gradients", OPTIMIZER, END, optimizer * 4 * params / states))
    if config.zero == 3 and config.pp > 1:
        # gathered once a step, and summed whole until the last micro-batch (FSDP2 under a pipeline)
        found.append(_named("gathered parameters", FORWARD, EXCHANGE, param_nbytes(config) * params))
        found.append(_named("gathered gradients", FORWARD, OPTIMIZER, 4 * params))
    elif config.zero == 3:
        layer = (layer_params(shape) - shape.experts * expert_params(shape) * (1 - 1 / config.ep)) / config.tp
        table = shape.vocab * shape.hidden / config.tp
        gathered = param_nbytes(config) * (params if config.keep_gathered else 2 * layer + table)
        found.append(_named("gathered parameters", FORWARD, EXCHANGE, gathered))
        found.append(_named("gathered gradients", LOSS, EXCHANGE, param_nbytes(config) * max(2 * layer, table)))
    return found


def _head(shape: TransformerShape, config: TrainingConfig) -> list[tuple[str, Interval]]:
    """Logits in the model's precision and in float32, their softmax and gradients; where they are gathered, whole on
    every rank, once as received and once joined."""
    gathered = config.gathered_logits and config.tp > 1
    logits = config.tokens * (shape.vocab if gathered else shape.vocab / config.tp)
    e = param_nbytes(config)
    held = EXCHANGE if gathered else BACKWARD  # the caller of a model that returns whole logits keeps them
    return [
        _named("logits", LOSS, held, (2 if gathered else 1) * e * logits),
        _named("float32 logits", LOSS, held, 4 * logits if e == 2 else 0),
        _named("softmax", LOSS, BACKWARD, 0 if config.in_place_loss or config.fusion == "all" else 4 * logits),
        _named("logits' gradients", LOSS, BACKWARD, (4 if config.in_place_loss else 8) * logits),
        _named("head inputs", LOSS, BACKWARD, 2 * e * config.tokens * shape.hidden),
    ]


def _working(shape: TransformerShape, config: TrainingConfig) -> float:
    """Beside what is kept: a layer computed again, and gradients of its widest part and of its input."""
    again = sum(layer_tensors(shape, config).values()) - layer_nbytes(shape, config)
    wide = (2 if shape.gated else 1) * shape.ffn * shape.experts_per_token / config.tp
    scores = 0.0
    if not config.attention.startswith("flash"):
        scores = config.tokens * config.seq * shape.heads / config.tp * (1 if config.attention == "fused" else 3)
    width = max(wide + shape.hidden, shape.hidden * 3)
    return max(again, 0.0) + param_nbytes(config) * (config.tokens * width + 2 * scores)


def _named(name: str, start: int, end: int, nbytes: float) -> tuple[str, Interval]:
    return name, Interval(start=start, end=end, nbytes=math.ceil(nbytes / BLOCK) * BLOCK)
