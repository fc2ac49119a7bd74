"""Random numbers are a function of (seed, step, site, shard): equal on replicas, different on shards."""

import pytest
import torch

from autopar.ops.attention import attention
from autopar.ops.dropout import dropout
from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.values.mesh import make_mesh

MESH = make_mesh((2, 2))
SHARDS = (("data", 0),)


def drop(rank: int, draws: Draws, shards: tuple[tuple[str, int], ...] = SHARDS) -> torch.Tensor:
    """Dropout of this rank's half of ones of shape [8, 64]."""
    with use_groups(Groups(mesh=MESH, rank=rank, groups={})), use_draws(draws):
        return dropout(torch.ones(4, 64), 0.5, site=3, shape=(8, 64), shards=shards)


@pytest.mark.parametrize("exact", [False, True])
def test_masks_agree_on_replicas_and_differ_on_shards(exact: bool) -> None:
    draws = Draws(seed=0, step=0, exact=exact)
    first, second, third, fourth = (drop(rank, draws) for rank in range(4))
    assert torch.equal(first, second) and torch.equal(third, fourth)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("exact", [False, True])
def test_masks_change_with_seed_and_step(exact: bool) -> None:
    outcomes = [drop(0, Draws(seed=s, step=t, exact=exact)) for s in range(2) for t in range(2)]
    assert len({tuple(o.flatten().tolist()) for o in outcomes}) == 4
    assert torch.equal(outcomes[0], drop(0, Draws(seed=0, step=0, exact=exact)))


def test_exact_shards_are_slices_of_the_whole_mask() -> None:
    draws = Draws(seed=0, step=0, exact=True)
    with use_draws(draws):
        whole = dropout(torch.ones(8, 64), 0.5, site=3)
    assert torch.equal(torch.cat([drop(0, draws), drop(2, draws)]), whole)


def test_kept_share_and_scale() -> None:
    with use_draws(Draws(seed=0, step=0)):
        out = dropout(torch.ones(1000, 100), 0.25, site=0)
    assert abs((out != 0).float().mean().item() - 0.75) < 0.01
    assert out.max().item() == pytest.approx(1 / 0.75)


def test_unbound_dropout_is_torch_dropout() -> None:
    x = torch.randn(8, 64)
    torch.manual_seed(5)
    expected = torch.nn.functional.dropout(x, 0.3)
    torch.manual_seed(5)
    assert torch.equal(dropout(x, 0.3, site=0), expected)


def weights(rank: int, draws: Draws) -> torch.Tensor:
    """Attention weights after dropout: attention over values that are the identity."""
    query, key = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(1)).chunk(2)
    value = torch.eye(8).expand(2, 2, 8, 8)
    with use_groups(Groups(mesh=MESH, rank=rank, groups={})), use_draws(draws):
        return attention(
            query,
            key,
            value,
            None,
            dropout_p=0.5,
            is_causal=False,
            scale=None,
            enable_gqa=False,
            site=1,
            shape=(4, 2, 8, 8),
            shards=SHARDS,
        )


@pytest.mark.parametrize("exact", [False, True])
def test_attention_dropout_agrees_on_replicas_and_differs_on_shards(exact: bool) -> None:
    draws = Draws(seed=0, step=0, exact=exact)
    zeros = [weights(rank, draws) == 0 for rank in range(4)]
    assert torch.equal(zeros[0], zeros[1]) and torch.equal(zeros[2], zeros[3])
    assert not torch.equal(zeros[0], zeros[2])


def test_attention_dropout_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    weights(0, Draws(seed=0, step=0))
    assert torch.equal(torch.get_rng_state(), before)
