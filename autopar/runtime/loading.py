"""Which checkpoint is loaded, and what of a run does each rank take from it?

Sizes of all files are looked at first; then every file is read once by one of the ranks and its checksum compared,
before anything is changed. A torn or changed checkpoint is passed over for the one before, with a warning.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import CheckpointError, PlanMismatchError
from autopar.runtime.checkpoint_group import Group, from_all, on_all, on_first
from autopar.runtime.checkpoint_root import candidates, check_contents, read_manifest, steps_below
from autopar.runtime.manifest import Manifest
from autopar.runtime.run_state import (
    DATA,
    RANDOM,
    RUN,
    alike,
    rank_files,
    restore_random_state,
    slices_of_ranks,
    unpacked,
)
from autopar.runtime.trainable import Trainable

STREAM = ("seed", "num_calls", "num_evaluated")
"""What of a module says which random numbers come next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A whole checkpoint. run: what all ranks share of it besides tensors. asked: what is to be restored, by kind."""

    folder: Path
    manifest: Manifest
    run: Mapping[str, Any]
    asked: Mapping[str, Any]


def latest(root: str | Path) -> int | None:
    """The step of the newest whole checkpoint below `root`, None if there is none; checksums are not looked at."""
    return next((found.step for found in candidates(Path(root)) if not found.problem), None)


def choose(root: Path, step: int | None, asked: Mapping[str, Any], group: Group) -> Chosen:
    """The checkpoint to load; all ranks call this together.

    Raises:
        CheckpointError: if there is none that is whole, or it lacks what is asked.
    """
    folder = _whole(root, step, group)
    return on_all("reading what is asked", lambda: _chosen(folder, asked), group)


def _whole(root: Path, step: int | None, group: Group) -> Path:
    """The newest checkpoint that is what was written."""
    passed_over: list[str] = []
    for named in on_first(f"looking below {root}", lambda: candidates(root, step), group):
        problem = named.problem or _changed(named.folder, group)
        if not problem:
            for text in passed_over:
                warnings.warn(f"{text}; step {named.step} is loaded instead", stacklevel=4)
            return named.folder
        passed_over.append(problem)
    raise CheckpointError(_none(root, step, passed_over))


def _none(root: Path, step: int | None, problems: list[str]) -> str:
    if problems:
        return f"no whole checkpoint is below {root}: " + "; ".join(problems)
    there = [str(number) for number, _ in steps_below(root)]
    if step is not None and there:
        return f"no step {step} is below {root}; there are {', '.join(there)}"
    if (root / ".metadata").is_file():
        return f"{root} is a checkpoint of torch.distributed.checkpoint itself; load takes the root that save was given"
    return f"no checkpoint is below {root}; ask autopar.runtime.latest(root) first where there may be none"


def _changed(folder: Path, group: Group) -> str:
    """What of a checkpoint is not what was written; each rank reads some of its files."""

    def problem() -> str:
        files = sorted(read_manifest(folder).files.items())
        try:
            check_contents(folder, files[dist.get_rank() :: dist.get_world_size()])
        except CheckpointError as error:
            return str(error)
        return ""

    return "; ".join(filter(None, from_all(f"reading {folder}", problem, group)))


def _chosen(folder: Path, asked: Mapping[str, Any]) -> Chosen:
    manifest = read_manifest(folder)
    if RUN not in manifest.files:
        raise CheckpointError(f"{folder} lists no {RUN}")
    run = unpacked(folder / RUN)
    if not all(type(run["stream"][name]) is int for name in STREAM):
        raise CheckpointError(f"{folder / RUN} has no numbers of {', '.join(STREAM)}")
    missing = sorted(set(asked) - set(manifest.holds))
    if missing:
        raise CheckpointError(
            f"{folder} holds {', '.join(('the module', *manifest.holds))}, and {', '.join(missing)} is asked for; "
            "leave it out of load, or give it to save"
        )
    for kind, name in run["kinds"].items():
        if kind in asked and type(asked[kind]).__name__ != name:
            raise PlanMismatchError(
                f"{folder} was saved with {kind} {name}, and a {type(asked[kind]).__name__} is given; give one of the "
                "kind that was saved"
            )
    return Chosen(folder=folder, manifest=manifest, run=run, asked=asked)


def restore_scheduler(chosen: Chosen) -> None:
    scheduler = chosen.asked.get("scheduler")
    if scheduler is not None:
        rates = chosen.run["scheduler"]
        groups, before = len(chosen.asked["optimizer"].param_groups), len(rates.get("base_lrs", ()))
        if "base_lrs" in rates and before != groups:
            raise PlanMismatchError(
                f"{chosen.folder} has learning rates of {before} groups of parameters, the optimizer has {groups}; "
                "give every rank the same groups"
            )
        scheduler.load_state_dict(rates)
    _say_left("scheduler", chosen)


def restore_data(chosen: Chosen, module: Trainable) -> None:
    """Give `data` the position of a rank that read the same slices of each batch.

    Raises:
        CheckpointError: if there was none, and positions differ between ranks.
    """
    _say_left(DATA, chosen)
    data = chosen.asked.get(DATA)
    if data is None:
        return
    files = rank_files(DATA, chosen.manifest)
    data.load_state_dict(unpacked(chosen.folder / files[_followed(chosen, files, slices_of_ranks(module))]))


def _followed(chosen: Chosen, files: Sequence[str], slices: Sequence[str]) -> int:
    """The rank whose position in the data this one takes."""
    if len({chosen.manifest.files[name].sha256 for name in files}) == 1:
        return 0
    rank, before = dist.get_rank(), list(chosen.run["slices"])
    if slices == before:
        return rank
    if slices[rank] in before:
        return before.index(slices[rank])
    raise CheckpointError(
        f"{chosen.folder} has a position in the data for each of {len(before)} ranks, and none of them read the part "
        "of each batch that this rank reads under this plan; leave data out of load, and set the position yourself"
    )


def restore_random(chosen: Chosen, device: torch.device) -> None:
    """Set this process's generators as the rank of its number had them; if the number of ranks is another, those that
    all ranks had alike."""
    files = rank_files(RANDOM, chosen.manifest)
    if len(files) == dist.get_world_size():
        files = [files[dist.get_rank()]]
    restore_random_state(alike([unpacked(chosen.folder / name) for name in files]), device)


def _say_left(kind: str, chosen: Chosen) -> None:
    """A run that goes on without what it had is not silent."""
    if kind in chosen.manifest.holds and kind not in chosen.asked and "optimizer" in chosen.asked:
        warnings.warn(f"{chosen.folder} holds {kind}, which load was not given and leaves", stacklevel=2)
