"""Source of synthetic inputs that are like the example inputs which a model was planned with."""

import torch
from torch import Tensor


def synthetic(shape: tuple[int, ...], dtype: torch.dtype, limit: int | None, example: Tensor | None) -> str:
    """Source of a tensor of an input.

    shape, dtype: of a global batch.
    limit: how many values the reader of an integer input knows, if it is one that says so (an embedding, a loss).
    example: what the model was planned with. None, or one without values (meta): integers are any below `limit`.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return f"torch.randn({shape}, dtype={dtype}, generator=generator)"
    found = _drawn_from(example, is_index=limit is not None)
    if found is None:
        found = (1, 1) if dtype == torch.bool else (0, (limit or 2) - 1)
    least, greatest = found
    if least != greatest:
        low = f"{least}, " if least else ""
        return f"torch.randint({low}{greatest + 1}, {shape}, dtype={dtype}, generator=generator)"
    if least in (0, 1):
        return f"torch.{'ones' if least else 'zeros'}({shape}, dtype={dtype})"
    return f"torch.full({shape}, {least}, dtype={dtype})"


def _drawn_from(example: Tensor | None, *, is_index: bool) -> tuple[int, int] | None:
    """The least and the greatest value to draw, the same where all are to be alike; None if the example has no
    values."""
    if type(example) is not Tensor or example.is_meta or not example.numel():
        return None
    values = example.detach().to(torch.int64)
    least, greatest = int(values.min()), int(values.max())
    if least < 0 <= greatest:  # -1 or -100 marks what does not count; what is between that and 0 means nothing
        least = int(values[values >= 0].min())
    if (least, greatest) == (0, 1) and not is_index:  # a mask, which drawn at random could leave a row without any
        most = int(2 * int(values.sum()) >= values.numel())
        return most, most
    return least, greatest
