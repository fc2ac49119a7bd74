"""Inductor with our partitioner, and the private parts of torch that it needs (checked with 2.13).

Importing inductor takes seconds, so that only who compiles with it imports this file.
"""

from collections.abc import Sequence
from typing import Any

from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from autopar.runtime.partition import mark


def inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """The backend."""
    with config.patch(custom_partitioner_fn=_MinCut()):
        return compile_fx(graph, inputs)


class _MinCut(CustomPartitionerFn):
    """Inductor's own partitioner on a marked graph: it keeps no more bytes than autograd would."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        mark(gm)
        return min_cut_rematerialization_partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """Of what was compiled in this way, in inductor's cache on disk."""
        return f"{__name__} 1"
