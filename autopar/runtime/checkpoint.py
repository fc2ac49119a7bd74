"""How is a run saved so that it goes on as if it had not ended, also under another plan or number of ranks?

A checkpoint is a new folder below a root, whole or not there at all (`runtime.saving`). It holds parameters, persistent
buffers, optimizer state and settings, the learning rate scheduler, random streams, the position in the data, the step
and the plan. It does not hold: gradients (save after `zero_grad`), buffers that are not persistent, a moving average
(a module of its own, below a root of its own), gradient scalers, hooks, compiled code, nor what the script itself
counts.

Tensors and optimizer state are keyed by parameter name, so that ranks of a pipeline, which hold different parameters,
write and read their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from autopar.errors import ArgumentError, RankError
from autopar.runtime.agreement import compare
from autopar.runtime.checkpoint_group import checkpoint_group, from_all, on_all
from autopar.runtime.loading import STREAM, Chosen, choose, restore_data, restore_random, restore_scheduler
from autopar.runtime.manifest import MAX_STEP
from autopar.runtime.optimizer_state import OPTIONS, asked_state, kept_if_it_fails, written_state
from autopar.runtime.optimizers import check_optimizer
from autopar.runtime.private_torch import local_tensor, stored_like
from autopar.runtime.run_state import (
    DATA,
    RANDOM,
    RUN,
    Stateful,
    packed,
    plain,
    random_state,
    rank_file,
    slices_of_ranks,
)
from autopar.runtime.saving import PLAN, RunCopy, finish_saving, write_beside, write_checkpoint
from autopar.runtime.torch_checkpoint import read_index, read_tensors
from autopar.runtime.trainable import DECORATED, Trainable
from autopar.values.plan import Plan, one_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded: the step it was saved as, and its folder."""

    step: int
    folder: Path


def save(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    root: str | Path,
    *,
    step: int,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    keep: int = 2,
    asynchronous: bool = False,
) -> None:
    """Write a checkpoint below the folder `root`, which all ranks see; all ranks call this.

    module: distributed, or a decorated model that is. optimizer: None for a module without (a moving average), of
        which then nothing but its own values and random stream is written.
    step: its number, larger than those already there.
    scheduler: of learning rates.
    data: what has the position in the data as `state_dict()`: a sampler, a stateful loader; each rank's own is kept.
    keep: how many whole checkpoints stay; older ones are deleted when this one is there.
    asynchronous: copy the state to the CPU's memory, and write it while training goes on. The next `save` or `load`,
        and `finish_saving`, wait for it and raise what it could not do.

    Raises:
        CheckpointError: on every rank, if one could not write; what was there before is as it was.
        RankError: if ranks call this differently, a rank died or did not come within the collective timeout.
        OptimizerError: for an optimizer that cannot serve DTensor parameters.
    """
    own = distributed_in(module)
    own.check_initialized()
    _check(step, keep)
    _check_scheduler(optimizer, scheduler)
    finish_saving()
    group = checkpoint_group()

    def prepare() -> RunCopy:
        return copy_state(own, optimizer, Path(root), step, scheduler, data, keep, asynchronous)

    run = _alike(f"copying step {step}", prepare)
    if asynchronous:
        write_beside(run, group)
    else:
        write_checkpoint(run, group)


def _check(step: int, keep: int) -> None:
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ArgumentError(f"step={step!r}: give the number of steps trained so far, from 0 on")
    if type(keep) is not int or keep < 1:
        raise ArgumentError(f"keep={keep!r}: give how many checkpoints are to stay, at least 1")


def _check_scheduler(optimizer: torch.optim.Optimizer | None, scheduler: Stateful | None) -> None:
    if scheduler is not None and optimizer is None:
        raise ArgumentError("a scheduler is given without its optimizer; give both, or neither")


def _alike(what: str, prepare: Callable[[], RunCopy]) -> RunCopy:
    """This rank's copy, once all ranks have one and ask for the same."""
    made: list[RunCopy] = []

    def facts() -> Mapping[str, str]:
        made.append(prepare())
        return made[0].alike

    differing = compare(dict(enumerate(from_all(what, facts, checkpoint_group()))))
    if differing:
        raise RankError(f"{what}: {differing}")
    return made[0]


def copy_state(
    module: Trainable,
    optimizer: torch.optim.Optimizer | None,
    root: Path,
    step: int,
    scheduler: Stateful | None,
    data: Stateful | None,
    keep: int,
    asynchronous: bool,
) -> RunCopy:
    """What this rank writes; with `asynchronous` apart from what training goes on to change."""
    tensors = _tensors(module, optimizer)
    files, holds, rank = {}, ["optimizer"] if optimizer is not None else [], dist.get_rank()
    if optimizer is not None:
        files[rank_file(RANDOM, rank)] = packed(random_state(module.device), "random state")
    if data is not None:
        holds.append(DATA)
        files[rank_file(DATA, rank)] = packed(data.state_dict(), "data.state_dict()")
    if scheduler is not None:
        holds.append("scheduler")
    rates = None if scheduler is None else plain(scheduler.state_dict(), "scheduler.state_dict()")
    plan = plan_of(module)
    if rank == 0:
        kinds = {"optimizer": optimizer, "scheduler": scheduler}
        files |= {RUN: _run(module, kinds, rates), PLAN: plan.to_json().encode()}
    alike = {"step": step, "keep": keep, "asynchronous": asynchronous, "holds": holds, "scheduler": rates}
    return RunCopy(
        root=root,
        step=step,
        keep=keep,
        model=plan.model,
        fingerprint=plan.fingerprint,
        holds=tuple(holds),
        alike={name: str(value) for name, value in alike.items()},
        tensors=_copied(tensors, "state", apart=asynchronous),
        files=files,
    )


def _run(module: Trainable, kinds: Mapping[str, Any], rates: Any) -> bytes:
    run = {
        "stream": {name: getattr(module, name) for name in STREAM},
        "slices": slices_of_ranks(module),
        "kinds": {name: type(value).__name__ for name, value in kinds.items() if value is not None},
        "scheduler": rates,
    }
    return packed(run, "run")


def _copied(value: Any, what: str, *, apart: bool) -> Any:
    """Nested state, of tensors and plain values; apart: its tensors copied to the CPU's memory."""
    if isinstance(value, Mapping):
        return {name: _copied(part, f"{what}.{name}", apart=apart) for name, part in value.items()}
    if not isinstance(value, Tensor):
        return plain(value, what)
    if not apart:
        return value
    return stored_like(local_tensor(value).detach().to("cpu", copy=True), value)


def load(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    root: str | Path,
    *,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    step: int | None = None,
) -> Loaded:
    """Restore the newest whole checkpoint below `root`, in place; plan, mesh and number of ranks may be others. All
    ranks call this.

    optimizer: None to take the module alone, without the ranks' random streams.
    scheduler, data: as given to `save`.
    step: the checkpoint to take; None for the newest whole one, with a warning where a newer one is torn.

    Raises:
        CheckpointError: if there is none, it is torn or changed, or it does not hold what is asked; says which file.
        PlanMismatchError: if it is of another model, or of another kind of optimizer or scheduler.
        RankError: if a rank died or did not come within the collective timeout.
    """
    own = distributed_in(module)
    _check_scheduler(optimizer, scheduler)
    finish_saving()
    group = checkpoint_group()
    asked = {"optimizer": optimizer, "scheduler": scheduler, DATA: data}
    chosen = choose(Path(root), step, {name: value for name, value in asked.items() if value is not None}, group)
    index = on_all("reading the index", lambda: read_index(chosen.folder, chosen.manifest.files), group)
    with kept_if_it_fails(optimizer):
        state, whole, without = _asked(own, optimizer, index)
        read_tensors(state, chosen.folder, index, group)
        whole |= state
        on_all(
            f"restoring step {chosen.manifest.step}", lambda: _restore(own, optimizer, whole, without, chosen), group
        )
    return Loaded(step=chosen.manifest.step, folder=chosen.folder)


def _asked(
    module: Trainable, optimizer: torch.optim.Optimizer | None, index: Metadata
) -> tuple[dict[str, Any], dict[str, Any], list[nn.Parameter]]:
    """What is read, what besides is set, and parameters whose optimizer state is not kept: the checkpoint has none."""
    module.flush()
    if optimizer is None:
        return _tensors(module, None), {}, []
    check_optimizer(optimizer)
    model, optim, whole, without = asked_state(module, optimizer, index)
    return {"model": model, "optimizer": optim}, {"made up": whole}, without


def _restore(
    module: Trainable,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    without: Sequence[nn.Parameter],
    chosen: Chosen,
) -> None:
    optimizers = () if optimizer is None else (optimizer,)
    set_state_dict(
        module,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state.get("made up", {}) | state.get("optimizer", {}),
        options=OPTIONS,
    )
    if optimizer is not None:
        for parameter in without:
            optimizer.state.pop(parameter, None)
    restore_scheduler(chosen)
    restore_data(chosen, module)
    module.seed, module.num_calls, module.num_evaluated = (chosen.run["stream"][name] for name in STREAM)
    if optimizer is not None:
        restore_random(chosen, module.device)


def distributed_in(module: nn.Module) -> Trainable:
    """The distributed module itself, of a decorated model the one that it became.

    Raises:
        ArgumentError: if it is none.
    """
    own = vars(module).get(DECORATED, module)
    if not isinstance(own, Trainable):
        raise ArgumentError(
            f"{type(module).__name__} is no distributed module; give what autopar.distribute returned, or a decorated "
            "model after its first call"
        )
    return own


def plan_of(module: Trainable) -> Plan:
    plan = cast(Any, module).plan
    return plan if isinstance(plan, Plan) else one_stage(plan)


def _tensors(module: Trainable, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    module.flush()
    if optimizer is None:
        return {"model": get_state_dict(module, (), options=OPTIONS)[0]}
    check_optimizer(optimizer)
    model, optim = written_state(module, optimizer)
    return {"model": model, "optimizer": optim}
