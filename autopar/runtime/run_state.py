"""What of a run is neither module nor optimizer? Each rank's random streams and its position in the data.

A rank that loads takes the random streams of the rank of its number, and the position of one that read the same slices
of each batch. What was alike on all ranks is every rank's, whatever their number. Where the number of ranks changes,
generators that stood differently on them are left as the new processes have them.
"""

import io
import pickle
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from autopar.errors import CheckpointError
from autopar.runtime.manifest import Manifest
from autopar.runtime.trainable import Trainable
from autopar.values.placement import local_ranges

RUN, RANDOM, DATA = "run.pt", "random", "data"


class Stateful(Protocol):
    """What has a state that a checkpoint keeps: a learning rate scheduler, a sampler, a stateful loader."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def rank_file(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.pt"


def random_state(device: torch.device) -> dict[str, Any]:
    """Where this rank's generators stand: torch's, Python's, numpy's, and its GPU's."""
    name, key, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(key.astype(np.int64)), position, has_gauss, gauss),
    }
    return state if device.type == "cpu" else {**state, "device": torch.cuda.get_rng_state(device)}


def alike(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The generators that stand alike in all states."""
    first, *others = [{kind: packed(value, kind) for kind, value in state.items()} for state in states]
    return {kind: states[0][kind] for kind, value in first.items() if all(o.get(kind) == value for o in others)}


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators that `state` has."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        name, key, *rest = state["numpy"]
        np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
    if "device" in state and device.type != "cpu":
        torch.cuda.set_rng_state(state["device"], device)


def packed(value: Any, what: str) -> bytes:
    """A value as the bytes of a file that `unpacked` reads.

    Raises:
        CheckpointError: if it has anything but tensors and plain values.
    """
    written = io.BytesIO()
    torch.save(plain(value, what), written)
    return written.getvalue()


def unpacked(path: Path) -> Any:
    """What a file of `packed` holds; nothing in it is executed.

    Raises:
        CheckpointError: if torch refuses it.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} holds no tensors and plain values: {error}") from error


def plain(value: Any, what: str) -> Any:
    """The value, numbers of numpy as Python's.

    Raises:
        CheckpointError: naming the first part that is neither a tensor nor a plain value.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(plain(part, f"{what}[{index}]") for index, part in enumerate(value))
    if type(value) in (dict, OrderedDict):
        return {plain(key, what): plain(part, f"{what}[{key!r}]") for key, part in value.items()}
    raise CheckpointError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors and plain values "
        "(None, numbers, texts, bytes, lists, tuples, dicts), for loading it must run nobody's code"
    )


def slices_of_ranks(module: Trainable) -> list[str]:
    """For each rank, which part of each batch it computes on; equal texts, equal parts."""
    world = dist.get_world_size()
    if not module.takes_slices:
        return ["whole"] * world
    plan = cast(Any, module).plan
    found = []
    for rank in range(world):
        coordinate = plan.mesh.coordinate(rank)
        ranges = [local_ranges(s.shape, plan.layouts[s.placeholder], plan.mesh, coordinate) for s in module.inputs]
        shapes = [spec.shape for spec in module.inputs]
        found.append(f"{plan.microbatches} x {shapes}: {ranges}")
    return found


def rank_files(kind: str, manifest: Manifest) -> list[str]:
    """The files of a kind, by the rank that wrote them.

    Raises:
        CheckpointError: if one is not there.
    """
    files = [rank_file(kind, rank) for rank in range(manifest.world)]
    if missing := [name for name in files if name not in manifest.files]:
        raise CheckpointError(f"step {manifest.step} was written by {manifest.world} ranks and lacks {missing[0]}")
    return files
