"""How does the Trainer of transformers train a planned model? A `Trainer` that distributes its model under a plan.

    trainer = Trainer(model, args, train_dataset=..., plan="plan.json")   # in each process that torchrun started
    trainer.train()

The plan's global batch is that of an optimizer step: per_device_train_batch_size x processes x
gradient_accumulation_steps. The Trainer collects the batches of a step and runs them as the plan says, in its
micro-batches and stages; every rank reads all rows. The model becomes the distributed module and keeps its class.
"""

import warnings
from collections.abc import Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.api.model_plan import ModelPlan
from autopar.errors import ArgumentError, BatchError
from autopar.integrations.accelerate import CHECKPOINT, Accelerator
from autopar.integrations.in_place import as_plan, distribute_with
from autopar.integrations.one_for_all import one_for_all
from autopar.integrations.packages import missing
from autopar.integrations.refused import refuse_arguments, refuse_optimizer
from autopar.integrations.whole_state import whole_state
from autopar.runtime import init, latest, load, save
from autopar.values.plan import Plan

try:
    import transformers
except ImportError as error:
    raise missing("transformers", error) from error

SCHEDULER, OPTIMIZER = "scheduler.pt", "optimizer.pt"
"""Files of the Trainer's own in a checkpoint's folder."""


class CountingAccelerator(Accelerator):
    """The Trainer's, which adds up what each rank counted of its batch: here each counted the global one."""

    def gather(self, tensor: Any) -> Any:
        """A whole number as this rank has it; else as ever."""
        if isinstance(tensor, Tensor) and not tensor.dim() and not tensor.is_floating_point():
            return tensor.reshape(1)
        return super().gather(tensor)


class Trainer(transformers.Trainer):
    """The Trainer of transformers, whose model is distributed by a plan.

    Args:
        model: as for the Trainer; it becomes the distributed module. Or give `model_init`.
        args: of which `per_device_train_batch_size` times processes times `gradient_accumulation_steps` is the plan's
            global batch.
        plan: from `autopar.plan`, `autopar.load_plan`, or the name of its file.
        distribute: keywords of `autopar.distribute`.
        options: other arguments of the Trainer, by name.

    Raises:
        ArgumentError: for an argument that the plan decides, would be ignored, or is not known to work with it.
        BatchError: if the arguments make steps of another size than the plan's.
        OptimizerError: for an optimizer that has made steps, or holds other parameters than the model's.
        MeshError, PlanMismatchError: as `autopar.distribute`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *,
        plan: Plan | str | Path,
        distribute: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.plan, self.distribute_options = as_plan(plan), dict(distribute or {})
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        refuse_arguments(args, self.plan)
        init()
        self._check_batch(args, options.get("train_dataset"))
        self._collected: list[dict[str, Any]] = []
        self._has_noticed = False
        self._whole: dict[str, Tensor] = {}
        if model is not None:
            optimizer = options.get("optimizers", (None, None))[0]
            distribute_with(model, self.plan, [] if optimizer is None else [optimizer], self.distribute_options)
        args.average_tokens_across_devices = False  # every rank counts those of the global batch
        super().__init__(model=model, args=args, **options)
        self.model_accepts_loss_kwargs = False  # the step is one batch, whose loss is the mean that the model takes
        if self._has_own_loss and (self.plan.microbatches > 1 or self.plan.num_stages > 1):
            raise ArgumentError(
                "a loss outside the model (compute_loss_func, label_smoothing_factor, compute_loss of a subclass) "
                f"needs the outputs of the whole batch, and the plan runs {self.plan.microbatches} micro-batches in "
                f"{self.plan.num_stages} stages; compute the loss in the model's forward, or plan one micro-batch"
            )

    @property
    def _own(self) -> Any:
        """The model, which there is from the first line on."""
        return self.model

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is computed outside the model."""
        overridden = type(self).compute_loss is not transformers.Trainer.compute_loss
        return overridden or self.compute_loss_func is not None or self.label_smoother is not None

    def _check_batch(self, args: transformers.TrainingArguments, data: Any) -> None:
        planned = self.plan.call.batch() if isinstance(self.plan, ModelPlan) and self.plan.call else None
        is_whole = cast(Any, args.accelerator_config).split_batches  # a loader's batch is that of all processes
        processes = 1 if is_whole else dist.get_world_size()
        parts = args.per_device_train_batch_size, processes, args.gradient_accumulation_steps
        asked = parts[0] * parts[1] * parts[2]
        if planned is not None and asked != planned:
            raise BatchError(
                f"the plan is for a global batch of {planned} samples a step; per_device_train_batch_size {parts[0]} x "
                f"{parts[1]} processes x gradient_accumulation_steps {parts[2]} are {asked}; change one of them, or "
                f"plan with global_batch={asked} (and microbatches={parts[2]} for as many parts)"
            )
        rows = len(data) if isinstance(data, Sized) else 0
        if self.plan.num_stages > 1 and rows % asked and not 0 < args.max_steps <= rows // asked:
            raise BatchError(
                f"an epoch of {rows} samples ends with {rows % asked}, and pipeline stages take the global batch of "
                f"{asked} alone; give the Trainer {rows - rows % asked} samples, or plan without stages"
            )

    def _notice(self, batch: Mapping[str, Any]) -> None:
        """Warn once, on the first rank, if whole batches are other calls than the planned one."""
        call = self.plan.call if isinstance(self.plan, ModelPlan) else None
        if self._has_noticed or call is None or call.args or dist.get_rank():
            return
        planned = {path: tuple(tensor.shape) for path, tensor in call.tensors().items()}
        given = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
        if given == planned or len(next(iter(batch.values()))) != call.batch():
            return
        self._has_noticed = True
        warnings.warn(
            f"the batches are not what was planned: they have {given}, the plan is for {planned}; each new form is "
            "captured and runs beside the planned step, in one piece; plan with a batch of this Trainer's collator, "
            "padded to one length",
            stacklevel=2,
        )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model that `model_init` makes, distributed."""
        return distribute_with(super().call_model_init(trial), self.plan, (), self.distribute_options)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = CountingAccelerator.around(self.accelerator, self.plan, self.distribute_options)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the Trainer's, of the parameters of the distributed model."""
        is_chosen = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        if not is_chosen and any(isinstance(parameter, DTensor) for parameter in self._own.parameters()):
            refuse_optimizer(self.args)
        return super().create_optimizer(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ArgumentError: trials change batch sizes and models, which the plan is for one of."""
        raise ArgumentError(
            "hyperparameter_search tries other batches and models than the plan's; start a run for each"
        )

    # Training.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Collect the batches of an optimizer step; with the last one forward and backward of them all.

        Returns:
            The loss of the step with its last batch, zero before.
        """
        own: Any = model
        own.train()
        self._collected.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        collected, self._collected = self._collected, []
        batch = _joined(collected)
        self._notice(batch)
        if not self._has_own_loss:
            return cast(Tensor, own.train_step(batch))
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, batch, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return cast(Tensor, loss.detach())

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._collected = []
        return super()._inner_training_loop(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share: the Trainer adds up those of all ranks, each of which counts the global batch and the
        parameters of its stages."""
        return round(super().floating_point_ops(inputs) / self.plan.mesh.size)

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole tensors, as `from_pretrained` reads them; all ranks call this.

        Raises:
            RankError: if another rank could not write.
        """
        self._whole = whole_state(self._own, keep=self.args.should_save)
        try:
            with one_for_all():
                super().save_model(output_dir, _internal_call)
        finally:
            self._whole = {}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Model and optimizer, each rank its part, below `output_dir`/autopar."""
        root = Path(output_dir) / CHECKPOINT
        save(self._own, self._inner_optimizer(), root, step=self.state.global_step, keep=1)
        with one_for_all():
            if self.args.should_save:
                torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights alone, of a checkpoint without optimizer; else `_load_optimizer_and_scheduler` loads all."""
        if latest(Path(resume_from_checkpoint) / CHECKPOINT) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if latest(folder / CHECKPOINT) is not None:
            load(self._own, self._inner_optimizer(), folder / CHECKPOINT)
            cast(Any, self.lr_scheduler).load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
        elif (folder / OPTIMIZER).exists():
            raise ArgumentError(
                f"{folder} has the optimizer state of a Trainer without a plan ({OPTIMIZER}), which is of whole "
                "parameters; begin anew from its weights: from_pretrained(folder), and train() without "
                "resume_from_checkpoint"
            )

    def _load_best_model(self) -> None:
        root = Path(str(self.state.best_model_checkpoint)) / CHECKPOINT
        if latest(root) is None:
            super()._load_best_model()
        else:
            load(self._own, None, root)

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return cast(torch.optim.Optimizer, getattr(optimizer, "optimizer", optimizer))


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The batches of an optimizer step as one.

    Raises:
        BatchError: if they have other keys, or tensors of other sizes than the batch's.
    """
    if len(batches) == 1:
        return batches[0]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for batch in batches for name in batch):
        values: list[Any] = [batch.get(name) for batch in batches]
        rows = {tuple(one.shape[1:]) if isinstance(one, Tensor) and one.dim() else None for one in values}
        if len(rows) > 1 or None in rows:
            sizes = [str(tuple(one.shape)) if isinstance(one, Tensor) else type(one).__name__ for one in values]
            raise BatchError(
                f"the batches of a step have {name} of sizes {', '.join(sizes)}, which do not make one batch; pad to "
                "one length (the collator's padding='max_length', or pad_to_multiple_of), and give each the same "
                "tensors"
            )
        joined[name] = torch.cat(values)
    return joined
