"""Small models that are neither language models nor classifiers of images, written as people write them."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.graph_models import MESSAGES, RECURRENT, TABLES
from tests.masked_models import MASKED
from tests.science_models import LOSSES, SCIENCE

KINDS = {
    "masked": MASKED,
    "messages": MESSAGES,
    "tables": TABLES,
    "recurrent": RECURRENT,
    "science": SCIENCE,
    "losses": LOSSES,
}
MODELS = {f"{kind}: {name}": build for kind, models in KINDS.items() for name, build in models.items()}


def other_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode and the keywords of one call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, kwargs = MODELS[name]()
    kwargs = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    return model.to(dtype).train(), kwargs
