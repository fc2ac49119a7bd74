"""Which part of a dim is whose: chunks with padding at the end, and how they are joined."""

import random

import pytest
import torch
from torch.nn import functional as F

from autopar.ops.shards import joined
from autopar.values.placement import chunk_size


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_chunks_join_to_the_whole_without_their_padding_and_without_gaps(memory_format: torch.memory_format) -> None:
    rng = random.Random(0)
    for _ in range(100):
        shape, n, dim = [rng.randint(1, 7) for _ in range(4)], rng.randint(1, 5), rng.randrange(4)
        whole = torch.randn(shape)
        length = chunk_size(shape[dim], n)
        missing = n * length - shape[dim]
        even = F.pad(whole, [0, 0] * (3 - dim) + [0, missing]).contiguous(memory_format=memory_format)
        chunks = [chunk.contiguous(memory_format=memory_format) for chunk in even.chunk(n, dim)]
        assert len(chunks) == n
        result = joined(chunks, dim, shape[dim] if missing else None)
        assert torch.equal(result, whole)
        assert result.untyped_storage().nbytes() == 4 * whole.numel(), "no gaps: products would keep a copy"
        assert result.is_contiguous(memory_format=memory_format) or result.is_contiguous()
