"""What ordinary code does to a module between two steps has the effect that it has in one process, or is refused."""

import pytest

import tests.ordinary_copies
import tests.ordinary_gradients
import tests.ordinary_parameters  # noqa: F401
from tests.ordinary_cases import KINDS, NEEDS_GRAPH, OPERATIONS, outcome
from tests.process_group import ranks

CAPTURED = "captured"
REFUSED = {
    "thaw_what_was_frozen": "training frozen needs another plan",
    "buffer_of_another_shape": "keep its size and dtype",
    "hook_on_a_part": "would never run",
    "backward_hook_on_a_part": "would never run",
    "hook_on_a_parameter": "a hook on a.weight, a distributed parameter, would never run",
    "late_hook_on_a_parameter": "a hook on a.weight, a distributed parameter, would never run",
    "hook_after_accumulation": "a hook on a.weight, a distributed parameter, would never run",
    "step_before_backward": "written in place between a call and its backward pass",
    "write_before_backward": "in place between a call",
    "gradients_of_parameters": "call backward() and read .grad",
    "gradients_of_parameters_or_none": "call backward() and read .grad",
    "gradients_of_some": "call backward() and read .grad",
    "pickled": "save module.state_dict()",
    "saved_whole": "save module.state_dict()",
    "inputs_of_another_shape": "must have same reduction dim",
    "inputs_without_values": "the plan is for torch.float64 with values",
    "half": "plan again",
    "to_float32": "plan again",
    "to_meta": "meta device by now",
    "remove_a_parameter": CAPTURED,
    "replace_a_part": CAPTURED,
    "replace_a_part_by_another": CAPTURED,
    "set_an_attribute": CAPTURED,
    "change_forward": CAPTURED,
    "parametrize_a_part": CAPTURED,
    "weight_norm": CAPTURED,
    "old_weight_norm": CAPTURED,
    "spectral_norm": CAPTURED,
    "functional_call": CAPTURED,
    "compiled": "call module.compile()",
    "call_a_part": "call the whole module",
}
"""Operations that no kind of plan can follow, and a word of what is said."""

OF_DTENSORS = {
    "assign_data": "changes nothing in torch",
    "vector_of_parameters": "changes nothing in torch",
    "own_gradients": "was replaced by a plain tensor",
    "replace_a_parameter": "not stored as the plan says",
}
"""Those that are refused where a parameter is a DTensor."""

BOTH_RAISE = {"backward_twice_without_retaining", "integer_inputs", "float32_inputs"}
"""Mistakes, of which torch says the same."""

TORCH_REFUSES = {"write_a_whole_tensor": "DTensor", "load_into_a_part": "DTensor"}
"""What torch refuses of DTensors."""

STEPPED = {
    "forward_hooks": "train_step runs forward and backward of each micro-batch itself",
    "backward_hook": "train_step runs forward and backward of each micro-batch itself",
    "clip_norm": "call module.clip_grad_norm_(max_norm)",
    "fewer_rows": "takes the global batch",
    "inputs_of_another_shape": "takes the global batch",
    "integer_inputs": "train the call that was planned",
}
"""What stages refuse of what a module that is called allows."""

ALL_OF_THEM = "fsdp"
SOME = {
    "ddp": [
        *OF_DTENSORS,
        *TORCH_REFUSES,
        *("initialise_at_random", "freeze_all_but_one", "tie_parameters", "step_before_backward", "gradients_of_some"),
        *("penalty_on_parameters", "gradients_of_inputs", "half", "weight_norm"),
    ],
    "outside": [
        *("freeze_all_but_one", "gradients_of_parameters_or_none", "gradients_of_some", "penalty_by_abs_norm"),
        *("step_before_backward", "write_before_backward", "two_forwards_two_backwards", "backward_twice"),
    ],
    "decorated": [
        *("write_buffers", "add_a_parameter", "replace_a_part_by_another", "set_an_attribute", "change_forward"),
        *("deepcopy", "pickled", "tie_parameters", "backward_pre_hook"),
    ],
    "stages": [
        *("freeze_a_parameter", "freeze_all_but_one", "write_data", "forward_hooks", "clip_norm", "clip_value"),
        *("deepcopy", "fewer_rows", "inputs_of_another_shape", "integer_inputs", "load_own_state", "evaluate"),
        *("penalty_alone", "zeros_for_gradients"),
    ],
    "microbatches": ["freeze_all_but_one", "accumulate", "forward_hooks", "clip_norm_infinite", "deepcopy"],
    "tensor": [
        *("freeze_all_but_one", "penalty_on_parameters", "gradients_of_inputs", "step_before_backward", "clip_norm"),
        *("penalty_by_mean", "scale_gradients", "two_forwards", "load_assigning"),
    ],
}
"""Operations in which a kind of plan differs from others."""


def asked(kind: str) -> list[str]:
    return [name for name in OPERATIONS if kind == ALL_OF_THEM] or SOME[kind]


def expected(kind: str, name: str) -> tuple[str, str]:
    """What comes of an operation, and a word of what is said."""
    if kind in ("stages", "microbatches") and name in STEPPED and (kind == "stages" or "hook" in name):
        return "refused", STEPPED[name]
    if name in REFUSED:
        return "refused", REFUSED[name]
    if name in BOTH_RAISE:
        return "both raise", ""
    if name == "gradients_of_gradients":
        return "raises", "once_differentiable"
    if kind == "ddp":
        return "as eager", ""
    if name in OF_DTENSORS:
        return "refused", OF_DTENSORS[name]
    if name in TORCH_REFUSES:
        return "raises", TORCH_REFUSES[name]
    return ("differs", "") if name == "initialise_at_random" else ("as eager", "")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in asked(kind)])
def test_the_effect_is_that_of_one_process_or_an_error(kind: str, name: str) -> None:
    word, says = expected(kind, name)
    for found, said in ranks(KINDS[kind]).run(outcome, kind, name):
        assert found == word, (found, said)
        assert says in said


def test_operations_on_a_loss_are_asked_of_those_who_have_one() -> None:
    assert not NEEDS_GRAPH & {*SOME["stages"], *SOME["microbatches"]}
