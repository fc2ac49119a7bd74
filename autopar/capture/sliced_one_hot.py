"""One-hot vectors of as many classes as the data have, of which forward keeps the first few.

`F.one_hot(i, max(i.max() + 1, n))[..., :n]` has n classes whatever the data are, and drops what is beyond.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from autopar.capture.knowledge import Knowledge
from autopar.capture.number_functions import least
from autopar.capture.numbers import Number
from autopar.capture.user_frame import asker, place_of
from autopar.errors import CaptureError
from autopar.ops.checked import ERROR


def one_hot(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """F.one_hot; None where the number of classes is known, or nothing is known of it."""
    given = {**dict(zip(("tensor", "num_classes"), args, strict=False)), **kwargs}
    indices, classes = given["tensor"], given.get("num_classes", -1)
    classes = classes.tensor if type(classes) is Number else classes
    if not isinstance(classes, Tensor) or questions.value(classes) is not None or least(classes) is None:
        return None
    place, text = place_of(asker())
    torch.ops.aten._assert_async.msg((indices >= 0).all(), f"{ERROR}{place}: one_hot: a class is negative")
    return _OneHot(indices, int(least(classes) or 0), f"{place}: forward makes one-hot vectors{text}")


class _OneHot:
    """What F.one_hot gives, at least `known` classes of it."""

    def __init__(self, indices: Tensor, known: int, where: str) -> None:
        self._indices, self._known, self._where = indices, known, where

    def __getitem__(self, key: Any) -> Tensor:
        last = key[1] if isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis else None
        if not isinstance(last, slice) or last.start or last.step not in (None, 1) or not isinstance(last.stop, int):
            self._refuse()
        if not 0 <= last.stop <= self._known:
            self._refuse()
        return (self._indices.unsqueeze(-1) == torch.arange(last.stop)).to(torch.int64)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"{self._where} of as many classes as the data have, so one graph cannot stand for the model; say how many "
            "(F.one_hot(i, n))"
        )

    __getattr__ = __iter__ = __len__ = __bool__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next((a for a in args if isinstance(a, cls)), None)
        if found is None:
            raise CaptureError("one-hot vectors of as many classes as the data have: say how many (F.one_hot(i, n))")
        found._refuse()
