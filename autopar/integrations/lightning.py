"""How does Lightning train a planned model? A strategy that distributes the part of a LightningModule that was planned.

    plan = autopar.load_plan("plan.json")                  # of `lit.model`, for as many ranks as devices
    trainer = L.Trainer(devices=4, strategy=AutoparStrategy(plan), ...)
    trainer.fit(lit, loader)                               # loader: global batches, the same on every rank

Every rank is given the global batch, as the distributed module takes it, so ranks are one process to Lightning's loops:
samplers are not split and draw alike, what is logged is the value of the whole batch.
A checkpoint is a folder that holds a checkpoint of `autopar.runtime` (parameters and optimizer by name, random streams)
with Lightning's own state in it, and is read under any plan and number of ranks of the model.
"""

import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import ArgumentError
from autopar.integrations.in_place import call_whole_steps, check_optimizers, distribute_with, is_distributed
from autopar.integrations.one_for_all import one_for_all
from autopar.integrations.packages import missing
from autopar.runtime import finish_saving, init, latest, load, save
from autopar.runtime.checkpoint import distributed_in
from autopar.runtime.launch import DEFAULT_TIMEOUT_SECONDS
from autopar.runtime.pipeline import PipelinedModule
from autopar.runtime.run_state import random_state, restore_random_state
from autopar.runtime.trainable import Trainable
from autopar.values.plan import Plan

try:
    from lightning.fabric.utilities.optimizer import _optimizers_to_device
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.strategies.parallel import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as error:
    raise missing("lightning", error) from error


class PlannedPrecision(Precision):  # type: ignore[misc]
    """Lightning's full precision: the plan says what is computed in which dtype. Clips over stages too."""

    def __init__(self, strategy: "AutoparStrategy") -> None:
        super().__init__()
        self.strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` in one process, of all gradients of the model."""
        if clip_val <= 0:
            return
        module = self.strategy.module
        if isinstance(module, PipelinedModule):
            module.clip_grad_norm_(float(clip_val))
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


class AutoparStrategy(ParallelStrategy):  # type: ignore[misc]
    """A Lightning strategy that trains one part of a LightningModule under a plan.

    Args:
        plan: from `autopar.plan` or `autopar.load_plan`, of that part.
        part: name of the attribute of the LightningModule that was planned; it has all trained parameters.
        keep: how many steps stay in a folder that is saved to again and again, as `last.ckpt` is.
        timeout_seconds: a collective or a missing rank that takes longer is an error on the ranks that wait for it.
        options: keywords of `autopar.distribute`.

    Raises:
        ArgumentError: for a precision of Lightning's that casts, parameters outside the part, a part that is not there.
        OptimizerError: for more than one optimizer, or one of other parameters.
        Everything that `autopar.distribute` raises, when the trainer sets up the model.
    """

    is_distributed = False
    """Samplers stay as they are: Lightning would split and shuffle them."""

    def __init__(
        self,
        plan: Plan,
        *,
        part: str = "model",
        keep: int = 1,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        **options: Any,
    ) -> None:
        super().__init__()
        self.plan, self.part, self.keep = plan, part, keep
        self.timeout_seconds, self.options = timeout_seconds, options
        self.num_nodes = 1

    @property
    def module(self) -> Trainable:
        """The distributed part.

        Raises:
            ArgumentError: before the trainer has set it up.
        """
        made = getattr(self.lightning_module, self.part, None)
        if not isinstance(made, nn.Module) or not is_distributed(made):
            raise ArgumentError(f"{self.part} is distributed when the trainer sets up the model, and is not yet")
        return distributed_in(made)

    # What Lightning asks of processes.

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin or PlannedPrecision(self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and type(plugin) not in (Precision, PlannedPrecision):
            raise ArgumentError(
                f"Trainer(precision=...) asks for {type(plugin).__name__}, which casts beside the plan; leave "
                "precision out of the Trainer and plan with precision='bf16-mixed', 'bf16' or 'fp64'"
            )
        self._precision_plugin = None if plugin is None else PlannedPrecision(self)

    def set_world_ranks(self) -> None:
        """Called by Lightning as soon as it knows the environment."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the other processes."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        ranks = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        ranks["LOCAL_WORLD_SIZE"] = self.num_processes
        store = {"MASTER_ADDR": environment.main_address, "MASTER_PORT": environment.main_port}
        os.environ.update({name: str(value) for name, value in (ranks | store).items()})
        init(timeout_seconds=self.timeout_seconds)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        told = [obj]
        dist.broadcast_object_list(told, src)
        return told[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """One value of what ranks have of the same thing: the mean, largest or least over ranks.

        A sum is the mean too: every rank saw the whole batch, so adding ranks up would count each sample once a rank.

        Raises:
            ArgumentError: for another reduction.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        kind = str(getattr(reduce_op, "name", reduce_op)).lower()
        operations = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if kind in operations:
            out = whole.detach().clone()
            dist.all_reduce(out, operations[kind], group=group)
            return out
        if kind not in ("mean", "avg", "sum", "none"):
            raise ArgumentError(f"reduce_op {reduce_op!r} over ranks is not known; give mean, sum, max or min")
        out = whole.detach().double()
        dist.all_reduce(out, group=group)
        return (out / dist.get_world_size(group)).to(whole.dtype if whole.is_floating_point() else torch.float32)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not dist.is_initialized():
            return decision
        told = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(told, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(told)

    # The model and its optimizer.

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """With `empty_init` nothing is allocated before the model is distributed."""
        device: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with device:
            yield

    def model_to_device(self) -> None:
        """What is not the part (metrics, buffers) goes to the rank's device; the part is there."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._distribute()
        self.model_to_device()
        restore_random_state(self.broadcast(random_state(self.root_device)), self.root_device)  # samplers draw alike
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _distribute(self) -> None:
        lit = self.lightning_module
        own = getattr(lit, self.part, None)
        if isinstance(own, nn.Module) and is_distributed(own):
            return
        if not isinstance(own, nn.Module):
            names = ", ".join(name for name, _ in lit.named_children()) or "none"
            raise ArgumentError(
                f"{type(lit).__name__} has no part {self.part!r} to distribute; its parts are: {names}; give "
                "AutoparStrategy(plan, part=NAME) the one that was planned"
            )
        inside = {id(parameter) for parameter in own.parameters()}
        outside = [name for name, parameter in lit.named_parameters() if id(parameter) not in inside]
        if outside:
            raise ArgumentError(
                f"{type(lit).__name__} has parameters outside {self.part}: {', '.join(outside[:3])}; plan and give the "
                "part that has them all"
            )
        distribute_with(own, self.plan, (), self.options)
        call_whole_steps(own)

    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        self.check_optimizers(self.optimizers)
        own = {id(parameter) for parameter in self.module.parameters()}
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["params"] = [p for p in group["params"] if id(p) in own]  # others are of other stages

    def check_optimizers(self, optimizers: list[Any]) -> None:
        """Raises OptimizerError for more than one, or one of parameters from before the part was distributed."""
        check_optimizers(optimizers, self.lightning_module, "make it in configure_optimizers, of self.parameters()")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        part = getattr(self.lightning_module, self.part)
        self.module.training = part.training  # after validation Lightning sets flags
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Wait for what is being written; the part stays where it is."""
        if dist.is_initialized():
            finish_saving()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What the LightningModule holds beside the part; parameters are written by `save_checkpoint`."""
        assert self.lightning_module is not None
        held = self.lightning_module.state_dict()
        return {name: value for name, value in held.items() if not name.startswith(f"{self.part}.")}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        beside = checkpoint["state_dict"]
        differing = sorted(set(self.lightning_module_state_dict()) ^ set(beside))
        if strict and differing:
            raise ArgumentError(
                f"the checkpoint and {type(self.lightning_module).__name__} differ in {', '.join(differing[:3])}; "
                "set strict_loading=False to leave them"
            )
        self.lightning_module.load_state_dict(beside, strict=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes it, each rank its part."""
        return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has read it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the folder `filepath`; all ranks call this.

        Raises:
            ArgumentError: for a path that is not on a file system, or storage options.
            CheckpointError: if a rank cannot write, or a value of Lightning's state is neither a tensor nor plain.
        """
        folder = self._folder(filepath, storage_options)
        step = int(checkpoint["global_step"])
        with one_for_all():
            if self.is_global_zero:
                _make_room(folder, step)
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None
        save(self.module, optimizer, folder, step=step, data=_Held(self._first_ranks(checkpoint)), keep=self.keep)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore the part, and in training its optimizer and random streams, from a folder; Lightning's own state."""
        held = _Held({})
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizer = self.optimizers[0] if fits and self.optimizers else None
        load(self.module, optimizer, self._folder(checkpoint_path, None), data=held)
        return held.state

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        try:
            shutil.rmtree(filepath)
        except OSError as error:
            warnings.warn(f"the old checkpoint {filepath} stays ({error}); remove it by hand", stacklevel=2)

    def _folder(self, filepath: Any, storage_options: Any) -> Path:
        path = str(self.broadcast(filepath))
        if "://" in path or storage_options is not None:
            raise ArgumentError(
                f"{path}: a checkpoint of a plan is a folder that all ranks write; give a path of a file system that "
                "they share, without storage options"
            )
        return Path(path)

    def _first_ranks(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Lightning's state as rank 0 has it, on every rank: ranks are one process to Lightning."""
        told: dict[str, Any] = self.broadcast(_plain(checkpoint))
        return told


def _plain(value: Any) -> Any:
    """The value with mappings as dicts, and parts of DTensors whole."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor()
    return type(value)(_plain(part) for part in value) if type(value) in (list, tuple) else value


def _make_room(folder: Path, step: int) -> None:
    """Steps below a root grow: what is there of this step or a later one is of a run that is written over."""
    if folder.is_file():
        folder.unlink()
    newest = latest(folder) if folder.is_dir() else None
    if newest is not None and newest >= step:
        shutil.rmtree(folder)


class _Held:
    """Lightning's state, as a checkpoint keeps the position in the data."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
