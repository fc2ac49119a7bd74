"""Does a rule name exactly what autograd keeps for backward? Tensors by storage, all else by size.

Rules are written for a GPU's kernels; where those of a CPU keep other tensors, `CPU_KEEPS` says so.
"""

import math

import pytest
import torch

from autopar.ops.random import Draws, use_draws
from autopar.rules.registry import RULES, rule_of
from autopar.rules.rule import choices
from autopar.values.graph import operands
from autopar.values.mesh import make_mesh
from tests.op_sample import Sample
from tests.op_samples import SAMPLES
from tests.ranks_in_threads import run_in_threads
from tests.rules_on_ranks import local_of

# Kernels of a GPU keep less than those of a CPU, which write out rms_norm and attention with dropout, a mask that needs
# a gradient, three dims or one head for all; of bags that are no maxima they keep a number each.
CPU_KEEPS = (
    "sdpa bias",
    "attention dropout",
    "rms_norm",
    "sdpa one key head",
    "sdpa three dims",
    "bags",
)


def kept(sample: Sample, dtype: torch.dtype) -> tuple[set[int], set[int], int]:
    """Inputs and results whose storage autograd keeps, and bytes of all other kept storages."""
    tensors = [
        t.requires_grad_(spec.needs_grad) for t, spec in zip(sample.tensors(dtype=dtype), sample.inputs, strict=True)
    ]
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), use_draws(Draws(seed=1, step=1, exact=True)):
        results = sample.run(*tensors)
    storages = {t.untyped_storage().data_ptr(): t for t in saved}
    inputs = {i for i, t in enumerate(tensors) if storages.pop(t.untyped_storage().data_ptr(), None) is not None}
    made = {i for i, t in enumerate(results) if storages.pop(t.untyped_storage().data_ptr(), None) is not None}
    return inputs, made, sum(t.untyped_storage().nbytes() for t in storages.values())


def test_products_keep_the_weights_instead_of_the_result() -> None:
    """Of attention on a CPU whose mask needs a gradient; query, key and value they keep as copies."""
    [sample] = [s for s in SAMPLES if s.name == "sdpa bias"]
    rule = rule_of(sample.node(torch.float64))
    inputs, results, nbytes = kept(sample, torch.float64)
    copied = sum(t.nbytes for i, t in enumerate(sample.tensors(dtype=torch.float64)) if i < 3 and i not in inputs)
    assert not results and rule.products_on_host
    assert math.isclose(nbytes, copied + rule.products_nbytes, abs_tol=16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_rule_saves_what_autograd_keeps(sample: Sample, dtype: torch.dtype) -> None:
    node = sample.node(dtype)
    rule = rule_of(node)
    is_one_kernel = sample.name.startswith("lstm (") and dtype == torch.float32  # of MKL-DNN, with a copy of its own
    if not rule.known or sample.name.startswith(CPU_KEEPS) or is_one_kernel:
        return
    numbers = [int(s.name.removeprefix("x")) for s in operands(node)]
    declared = {numbers[i] for i in rule.saves}, set(rule.saves_results)
    inputs, results, nbytes = kept(sample, dtype)
    if rule.alias == 0 and 0 in results:  # a view's storage is its operand's
        inputs.add(0)
    if isinstance(node.target, torch._ops.OpOverload) and str(node.target) not in RULES:  # pointwise: assumed the worst
        assert inputs <= declared[0] and results <= declared[1]
        return
    assert (inputs, results) == declared
    assert math.isclose(nbytes, rule.saves_nbytes, abs_tol=16)  # numbers kept as tensors


@pytest.mark.parametrize("dim", [0, 2])
def test_a_split_batch_norm_keeps_no_copy_of_its_operand(dim: int) -> None:
    """What is replayed for it is not kept: 7% of the peak of a ResNet whose plan made such operands again."""
    [sample] = [s for s in SAMPLES if s.name == "batch_norm"]
    node, mesh = sample.node(), make_mesh((2,))
    rule = rule_of(node)
    [chosen] = [c for c in choices(rule) if getattr(c.operands[0], "dim", None) == dim]
    assert rule.localize is not None
    target, args, kwargs = rule.localize(local_of(node, (chosen,), mesh))
    assert kwargs["axis"]

    def kept_of(rank: int) -> tuple[set[int], int]:
        x, *channels = sample.tensors()
        given = [x.chunk(2, dim)[rank].clone(), *channels]
        leaves = [t.requires_grad_(spec.needs_grad) for t, spec in zip(given, sample.inputs, strict=True)]
        saved: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            saved.append(t)
            return t

        values = {f"x{i}": leaf for i, leaf in enumerate(leaves)}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            target(*torch.fx.node.map_arg(args, lambda n: values[n.name]), **kwargs)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        known = {i for i, t in enumerate(leaves) if storages.pop(t.untyped_storage().data_ptr(), None) is not None}
        return known, sum(storages.values())

    channel_nbytes = sample.inputs[1].shape[0] * 8
    for operands_kept, nbytes in run_in_threads(mesh, kept_of)[0]:
        assert operands_kept <= set(rule.saves) and 0 in operands_kept
        assert nbytes <= 3 * channel_nbytes  # mean, deviation, and its product with the weight
