"""What the runtime uses of private torch is there, and does what it is used for: a torch that changes it fails here."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import pipelining

from autopar.runtime import private_torch


class Twice(torch.autograd.Function):
    """A node of Python's, of which torch 2.11 tells no shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seen = private_torch.in_backward()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert private_torch.in_backward() and not ctx.seen
        return 2 * gradients[0]


def test_a_backward_pass_begins_at_edges_and_at_tensors() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    unused = torch.randn(3, requires_grad=True)
    y: Tensor = Twice.apply(x.exp())  # type: ignore[no-untyped-call]
    gradient = torch.randn(3, dtype=torch.float64)
    for root in (y, get_gradient_edge(y)):
        found, none = private_torch.gradients_from((root,), (gradient,), (x, unused), retain_graph=True)
        assert none is None and found is not None
        torch.testing.assert_close(found, 2 * gradient * x.detach().exp())
    assert x.grad is None


def test_a_call_runs_when_backward_ends() -> None:
    x, seen = torch.ones(2, requires_grad=True), []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            private_torch.when_backward_ends(lambda: seen.append("end"))
            seen.append("backward")
            return gradients[0]

    Noting.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["backward", "end"] and x.grad is not None


def test_what_autograd_made_is_known_of_a_subclass_too() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    x = torch.ones(2, requires_grad=True)
    assert private_torch.is_made(x * 2) and not private_torch.is_made(x)
    assert not private_torch.is_made(torch.ones(2).as_subclass(Loud))


def test_a_stage_greets_other_ranks_alone() -> None:
    assert callable(pipelining.PipelineStage._get_init_p2p_neighbors_ops)
    greetings: Callable[[], list[Any]] = lambda: [SimpleNamespace(group_peer=peer) for peer in (0, 1, 1, 2)]  # noqa: E731
    stage = SimpleNamespace(group_rank=1, _get_init_p2p_neighbors_ops=greetings)
    private_torch.greet_others(stage)
    assert [op.group_peer for op in stage._get_init_p2p_neighbors_ops()] == [0, 2]


def test_a_piece_of_a_checkpoint_is_where_it_was_put() -> None:
    assert private_torch.storage_of(private_torch.stored_at("__0_0.distcp", 3, 4)) == ("__0_0.distcp", 3, 4)


def test_a_plain_tensor_is_its_own_part_and_stored_as_one_is() -> None:
    x = torch.ones(2)
    assert private_torch.local_tensor(x) is x and private_torch.stored_like(x, torch.zeros(2)) is x
    strided: Any = private_torch.strided_shard(1, 2)
    assert (strided.dim, strided.split_factor) == (1, 2)
