"""What does one rank see of a plan? Its errors over some steps, what it sends, and the most it holds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.lower.messages import Sent, sent_by_rank
from autopar.oracle import TrainedStep
from autopar.oracle.compare import floor_of, relative_error
from autopar.passes.split_stages import split_stages
from autopar.runtime import count_messages, distributed_module
from autopar.runtime.data import local_samples
from autopar.runtime.peak_memory import watch
from autopar.search.staged.staged_memory import peaks_without_optimizer
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel, ParameterSpec
from autopar.values.placement import local_ranges
from autopar.values.plan import Plan
from autopar.verification.check import PEAK_TOLERANCE, PlanCheck
from autopar.verification.one_process import SEED

DEVICES = {"cpu": "cpu", "cuda": "h100"}
"""What plans can be run on, and a preset device that holds as much: of GPUs it is the same on every one."""


STEPS = 3
"""In how many steps at most a peak is measured; the least counts, for Gloo's threads hold what they sent a while."""


def check_rank(
    label: str,
    plan: Plan,
    captured: CapturedModel,
    tensors: Mapping[str, Any],
    wanted: Sequence[TrainedStep],
) -> PlanCheck:
    """This rank's view of one plan."""
    module, predicted, predicted_peak = _prepared(captured, plan, tensors)
    is_local = module.takes_slices
    errors = {"loss": (0.0, ""), "gradient": (0.0, ""), "state": (0.0, "")}
    first, counted, peak = 0.0, dict[Any, Any](), 0
    for number, (whole, step) in enumerate(zip(tensors["inputs"], wanted, strict=True)):
        inputs = own_inputs(module, captured, whole)
        if number:
            loss = module.step(inputs, is_local=is_local)
        else:
            with count_messages(module) as sent, watch(module, inputs) as memory:
                loss = module.step(inputs, is_local=is_local)
            first, counted, peak = float(loss.detach()), dict(sent), memory.peak
        found = {
            "loss": (relative_error(loss.detach().cpu(), step.loss), ""),
            "gradient": _gradient_error(module, step.gradients, floor_of(p.dtype for p in captured.parameters)),
            "state": _state_error(module, step.state),
        }
        errors = {kind: _worse(errors[kind], found[kind]) for kind in errors}
        module.zero_grad(set_to_none=True)
    peak = _least_peak(
        module, own_inputs(module, captured, tensors["inputs"][0]), predicted_peak, peak, is_local=is_local
    )
    return PlanCheck(
        plan=label,
        loss=first,
        loss_error=errors["loss"][0],
        gradient_error=errors["gradient"][0],
        worst_gradient=errors["gradient"][1],
        state_error=errors["state"][0],
        worst_state=errors["state"][1],
        predicted=predicted,
        counted=counted,
        predicted_peak=predicted_peak,
        measured_peak=peak,
    )


Error = tuple[float, str]
"""How far, and what."""


def _worse(one: Error, other: Error) -> Error:
    """The larger error; what is not a number is the largest."""
    return one if other[0] <= one[0] else other


def _least_peak(module: Any, inputs: Mapping[str, Tensor], predicted: float, peak: int, *, is_local: bool) -> int:
    """The peak of the first step or, where any rank's is not as predicted, the least of some steps."""
    import torch.distributed as dist

    for _ in range(STEPS - 1):
        is_off = torch.tensor(abs(predicted / peak - 1) > PEAK_TOLERANCE, dtype=torch.int32)
        dist.all_reduce(is_off)
        if not is_off:
            break
        module.zero_grad(set_to_none=True)
        with watch(module, inputs) as memory:
            module.step(inputs, is_local=is_local)
        peak = min(peak, memory.peak)
    return peak


Prepared = tuple[Any, Sent, float]
"""A module, what it should send in a step, and its predicted peak."""


def own_inputs(module: Any, captured: CapturedModel, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a rank gives its module of a global batch: its slices where it takes them."""
    if not module.takes_slices:
        return whole
    return {s.placeholder: local_samples(module, s, whole[s.placeholder]).clone() for s in captured.inputs}


def _prepared(captured: CapturedModel, plan: Plan, tensors: Mapping[str, Any]) -> Prepared:
    """Of a plan, on this rank's stages."""
    stages = split_stages(captured, plan.cuts)
    module = distributed_module(captured, plan, tensors["values"], sync=False, seed=SEED, exact_random=True)
    on_host = module.device.type == "cpu"
    place = module.pipeline_rank
    sent = sent_by_rank(stages, plan, plan.stages_of(place), module.groups.rank, on_host=on_host, exact_random=True)
    peaks = peaks_without_optimizer(plan, stages, load_cluster(f"{plan.mesh.size}x{DEVICES[module.device.type]}"))
    return module, sent, peaks[place]


def _gradient_error(module: Any, gradients: Mapping[str, Tensor], part: float) -> Error:
    """part: of the largest entry of any gradient, below which differences are of that."""
    floor = part * max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    worst: Error = (0.0, "")
    for state in module.states:
        for parameter in state.specs.values():
            if parameter.trainable:
                whole = gradients[parameter.names[0]]
                own = _own_error(state, parameter, state.gradient(parameter.placeholder), whole, floor)
                worst = _worse(worst, (own, parameter.names[0]))
    return worst


def _state_error(module: Any, wanted: Mapping[str, Tensor]) -> Error:
    """Of buffers, and of parameters, which only forward can have written."""
    worst: Error = (0.0, "")
    for state in module.states:
        for parameter in state.specs.values():
            name = parameter.names[0]
            held = state.stored[parameter.placeholder].detach()
            worst = _worse(worst, (_own_error(state, parameter, held, wanted[name], 0.0), name))
        for buffer in state.local.captured.buffers:
            name = buffer.names[0]
            worst = _worse(worst, (relative_error(module.get_buffer(name).cpu(), wanted[name]), name))
    return worst


def _own_error(state: Any, parameter: ParameterSpec, held: Tensor | None, whole: Tensor, floor: float) -> float:
    """The error of a rank's part of what is stored as a parameter is, relative to the whole."""
    ranges = local_ranges(parameter.shape, state.layout(parameter.placeholder), state.mesh, state.coordinate)
    part = whole[tuple(slice(start, start + length) for start, length in ranges)]
    if part.numel() == 0:
        return 0.0
    if held is None:  # as of what nothing reads, whose gradient is compared as zeros
        return float("inf") if bool(whole.any()) else 0.0
    return relative_error(held.cpu(), part, max(float(whole.abs().max()), floor))
