"""What runs under torchrun: the distributed module, what belongs to it, and every function that exported code calls."""

from autopar.ops.attention import attention
from autopar.ops.bags import bags
from autopar.ops.batch_norm import batch_norm
from autopar.ops.checked import checked
from autopar.ops.collectives import (
    all_gather,
    all_reduce,
    all_reduce_gradient,
    all_to_all,
    divide,
    divide_gradient,
    local_slice,
    pad_dim,
    place_slice,
    reduce_scatter,
)
from autopar.ops.cross_entropy import count_labels, cross_entropy
from autopar.ops.drawn import drawn
from autopar.ops.dropout import alpha_dropout, dropout, rrelu
from autopar.ops.embedding import embedding
from autopar.ops.grouped_linear import grouped_linear
from autopar.ops.mean import mean
from autopar.ops.noise import noise
from autopar.ops.own_local import own_local
from autopar.ops.recompute import again
from autopar.runtime.checkpoint import Loaded, load, save
from autopar.runtime.data import DistributedBatchSampler, LocalBatch
from autopar.runtime.distributed import distributed_module
from autopar.runtime.exported import block, load_exported
from autopar.runtime.initialize import reset_buffers, reset_parameters
from autopar.runtime.launch import init
from autopar.runtime.loading import latest
from autopar.runtime.module import DistributedModule, count_messages
from autopar.runtime.optimizers import check_optimizer
from autopar.runtime.pipeline import PipelinedModule
from autopar.runtime.saving import finish_saving
from autopar.runtime.trainable import Output

__all__ = [
    "DistributedBatchSampler",
    "DistributedModule",
    "Loaded",
    "LocalBatch",
    "Output",
    "PipelinedModule",
    "again",
    "all_gather",
    "all_reduce",
    "all_reduce_gradient",
    "all_to_all",
    "alpha_dropout",
    "attention",
    "bags",
    "batch_norm",
    "block",
    "check_optimizer",
    "checked",
    "count_labels",
    "count_messages",
    "cross_entropy",
    "distributed_module",
    "divide",
    "divide_gradient",
    "drawn",
    "dropout",
    "embedding",
    "finish_saving",
    "grouped_linear",
    "init",
    "latest",
    "load",
    "load_exported",
    "local_slice",
    "mean",
    "noise",
    "own_local",
    "pad_dim",
    "place_slice",
    "reduce_scatter",
    "reset_buffers",
    "reset_parameters",
    "rrelu",
    "save",
]
