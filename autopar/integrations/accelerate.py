"""How does Accelerate train a planned model? An `Accelerator` that distributes the model it prepares under a plan.

    accelerator = Accelerator(plan="plan.json")            # of the model, for as many ranks as processes
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Loaders keep the batch size of a process, as ever in Accelerate; prepared, they give every rank the rows of all
processes together, the global batch that the plan is for. The model returns what it returns for that batch. So ranks
are replicas to Accelerate, each of which saw everything: `gather` and `reduce` count as in data parallelism, and
`gather_for_metrics` gives each sample once.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autopar.errors import ArgumentError
from autopar.integrations.global_batches import with_batches_joined
from autopar.integrations.in_place import (
    as_plan,
    call_whole_steps,
    check_optimizers,
    distribute_with,
    is_distributed,
)
from autopar.integrations.one_for_all import one_for_all
from autopar.integrations.packages import missing
from autopar.integrations.refused import refuse_options, refuse_precision, refuse_state
from autopar.integrations.whole_state import whole_state
from autopar.runtime import init, latest, load, save
from autopar.runtime.checkpoint import distributed_in
from autopar.runtime.pipeline import PipelinedModule
from autopar.values.plan import Plan

try:
    import accelerate
    from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
except ImportError as error:
    raise missing("accelerate", error) from error

CHECKPOINT = "autopar"
"""Folder of model and optimizer inside a folder of saved state."""


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's, whose model is distributed by a plan.

    Args:
        plan: from `autopar.plan`, `autopar.load_plan`, or the name of its file.
        distribute: keywords of `autopar.distribute`, such as `loss_fn`.
        options: those of `accelerate.Accelerator`. `cpu` is what the process group says if it is not given.

    Raises:
        ArgumentError: for an option that the plan decides or would ignore; says what to do instead.
        MeshError: if no launcher started this process as one of several.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *, plan: Plan | str | Path, distribute: dict[str, Any] | None = None, **options: Any) -> None:
        refuse_options(options)
        device = init()
        options.setdefault("cpu", device.type == "cpu")
        super().__init__(**options)
        self._take(as_plan(plan), distribute)

    @classmethod
    def around(
        cls, other: accelerate.Accelerator, plan: Plan, distribute: dict[str, Any] | None = None
    ) -> "Accelerator":
        """One that goes on where another was set up."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(other))
        made._take(plan, distribute)
        return made

    def _take(self, plan: Plan, distribute: dict[str, Any] | None) -> None:
        refuse_state(self)
        refuse_precision(self.mixed_precision, plan)
        self.native_amp = False  # the plan's graphs compute in its precision
        self.plan, self.options = plan, dict(distribute or {})

    # Preparing.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As ever; an optimizer that is prepared with its model may have been made before or after.

        Raises:
            ArgumentError: for a second model.
            OptimizerError: for a second optimizer, or one that holds other parameters than the model's.
            Everything that `autopar.distribute` raises.
        """
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        for model in (one for one in args if isinstance(one, nn.Module)):
            self._distribute(model, optimizers)
        if models := [one for one in (*args, *self._models) if isinstance(one, nn.Module)]:
            known = [*self._optimizers, *(one for one in optimizers if one not in self._optimizers)]
            instead = "prepare it together with the model, or make it of the prepared model's parameters"
            check_optimizers(known, models[0], instead)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model itself, distributed under the plan."""
        self._distribute(model, ())
        if model not in self._models:
            self._models.append(model)
        cast(Any, model)._is_accelerate_prepared = True
        return model

    def _distribute(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        others = [one for one in self._models if one is not model]
        if others:
            raise ArgumentError(
                f"this Accelerator has prepared a {type(others[0]).__name__}, and its plan is of one model; use "
                f"another Accelerator with a plan of the {type(model).__name__}"
            )
        if not is_distributed(model):
            distribute_with(model, self.plan, [getattr(one, "optimizer", one) for one in optimizers], self.options)
            call_whole_steps(model)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """A loader that gives every rank the rows that all processes would have had together.

        Raises:
            BatchError: if the rows of a batch are not known.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        joined = with_batches_joined(data_loader, 1 if self.split_batches else self.num_processes)
        prepared: Any = prepare_data_loader(
            joined,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        _share_order(prepared, self.rng_types)
        self._dataloaders.append(prepared)
        return cast(DataLoader[Any], prepared)

    # Training.

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Scale gradients so that their norm, over all ranks, is at most `max_norm`; the norm before, whole.

        Raises:
            ArgumentError: on stages, for a norm that is not the second or parameters that are not all of the model's.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        module = distributed_in(self._models[0]) if self._models else None
        if isinstance(module, PipelinedModule):
            own = {id(parameter) for parameter in module.parameters()}
            if norm_type != 2 or {id(one) for one in given} != own:
                raise ArgumentError(
                    f"on pipeline stages gradients are clipped by the norm 2 of all parameters, and norm_type "
                    f"{norm_type} of {len(given)} of {len(own)} was asked; give model.parameters() and norm_type=2"
                )
            return module.clip_grad_norm_(max_norm)
        norm = super().clip_grad_norm_(given, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Each sample of the current batch once: what has a row for each sample of the global batch is on every rank
        already; what has not is this rank's, and is gathered as ever."""
        rows, found = self._rows_of_batch(), _rows_of(input_data)
        if found is not None and rows in (None, found):
            return input_data
        return super().gather_for_metrics(input_data, use_gather_object)

    def _rows_of_batch(self) -> int | None:
        """Rows of the global batch that a loader gave last, None if it does not know."""
        state = self.gradient_state
        loader = state.active_dataloader
        if loader is None:
            return None
        whole = getattr(loader.batch_sampler, "batch_size", None)  # a user's own sampler may not say
        if not state.end_of_dataloader:
            return whole
        if state.remainder > 0:
            return int(state.remainder)
        return whole if state.remainder == 0 or getattr(loader, "_drop_last", False) else None

    # Saving.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors by the names of the original model, on the main process; empty on the others. All ranks call
        this."""
        if not is_distributed(model):
            return dict(super().get_state_dict(model, unwrap))
        each_node = self.project_configuration.save_on_each_node
        return whole_state(model, keep=self.is_local_main_process if each_node else self.is_main_process)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Model and optimizer below `output_dir`/autopar, under any plan and number of ranks to load; beside them what
        Accelerate saves. All ranks call this.

        Raises:
            CheckpointError, RankError: on every other rank too, if one could not write.
        """
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            with one_for_all():
                folder = super().save_state(output_dir, safe_serialization, **options)
        finally:
            self._models, self._optimizers = models, optimizers
        if models:
            root = Path(folder) / CHECKPOINT
            newest = latest(root)
            save(models[0], self._inner_optimizer(), root, step=0 if newest is None else newest + 1, keep=1)
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **options: Any) -> None:
        """What `save_state` wrote, under this plan and number of ranks. All ranks call this.

        Raises:
            ArgumentError: for a folder that an Accelerator without a plan wrote.
            CheckpointError, PlanMismatchError: as `autopar.runtime.load`.
        """
        folder = self._saved_in(input_dir)
        models, optimizers = self._models, self._optimizers
        if models and latest(folder / CHECKPOINT) is None:
            raise ArgumentError(
                f"{folder} holds no folder {CHECKPOINT}: an Accelerator with a plan did not write it; read its weights "
                "with model.load_state_dict before or after prepare, and begin with a new optimizer"
            )
        self._models, self._optimizers = [], []
        try:
            super().load_state(str(folder), load_kwargs, **options)
        finally:
            self._models, self._optimizers = models, optimizers
        if models:
            load(models[0], self._inner_optimizer(), folder / CHECKPOINT)

    def _saved_in(self, input_dir: Any) -> Path:
        """The folder that `load_state` is asked for."""
        if input_dir is not None:
            return Path(input_dir).expanduser()
        project = self.project_configuration
        if not project.automatic_checkpoint_naming or self.project_dir is None:
            raise ArgumentError("load_state was given no folder, and checkpoints are not named automatically; give one")
        below = Path(self.project_dir) / "checkpoints"
        named = [path for path in below.glob("checkpoint_*") if path.name.rpartition("_")[2].isdigit()]
        if not named:
            raise ArgumentError(f"no checkpoint is below {below}; call save_state first")
        return max(named, key=lambda path: int(path.name.rpartition("_")[2]))

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Raises ArgumentError: no whole state dict is made there that a hook could change."""
        raise ArgumentError(
            "save_state writes each rank's part of the model, and has no state dict for a hook; write what else is to "
            "be saved with register_for_checkpointing, or save accelerator.get_state_dict(model) beside it"
        )

    def register_load_state_pre_hook(self, hook: Any) -> Any:
        """Raises ArgumentError, as `register_save_state_pre_hook`."""
        raise ArgumentError("load_state reads each rank's part of the model; load what else was saved after it")

    def _inner_optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizers[0].optimizer if self._optimizers else None


def _rows_of(data: Any) -> int | None:
    """Rows of nested tensors, or entries of a list of other things; None if there are neither."""
    if isinstance(data, Tensor):
        return data.shape[0] if data.dim() else None
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if not isinstance(parts, list | tuple) or not parts:
        return None
    return _rows_of(parts[0]) if isinstance(parts[0], Tensor | Mapping | list | tuple) else len(parts)


def _share_order(loader: Any, kinds: Iterable[Any]) -> None:
    """Let all ranks draw one order: the generators that Accelerate would share between processes are rank 0's, also
    where a loader is prepared as that of one process."""
    sampler = loader.get_sampler()
    generator = getattr(loader.dataset, "generator", None)
    if not isinstance(sampler, SeedableRandomSampler) and hasattr(sampler, "generator"):
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        generator = sampler.generator
    loader.synchronized_generator = generator
    loader.rng_types = [str(kind) for kind in kinds if generator is not None or str(kind) != "generator"]
