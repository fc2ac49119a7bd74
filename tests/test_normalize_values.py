"""Normalising keeps values and gradients: the eager module = its captured graph, as it is and called natively."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.errors import CaptureError
from benchmarks.op_db_samples import Key, Sample, SampleModel, outcomes
from tests.value_cases import CASES, Case


def sample_of(name: str, case: Case) -> Sample:
    """A case as one call of random parameters and of the tensors that it gives."""
    function, given = case
    generator = torch.Generator().manual_seed(len(name))

    def leaf(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.randn(value, generator=generator, dtype=torch.float64).requires_grad_()

    key = Key(table="case", op=name, dtype="float64", index=0)
    return Sample(key=key, call=lambda leaves: function(*leaves), leaves=[leaf(value) for value in given])


@pytest.mark.parametrize("subject", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_rewrite_keeps_values_and_gradients(subject: str) -> None:
    samples = [sample_of(name, case) for name, case in CASES[subject].items()]
    found = {sample.key.op: outcome for sample, outcome in outcomes(samples)}
    assert set(found) == set(CASES[subject])
    assert {name: outcome for name, outcome in found.items() if outcome.kind != "equal"} == {}


@pytest.mark.parametrize(
    "body",
    [lambda w: (w * 2)[1:].as_strided((2, 2), (2, 1), 0), lambda w: w[:1].expand(3, 4).as_strided((2, 2), (2, 1))],
    ids=["before it", "with overlaps"],
)
def test_strides_over_memory_that_is_not_the_operands_are_refused(body: Any) -> None:
    model = SampleModel([sample_of("strides", (body, ((3, 4),)))])
    with pytest.raises(CaptureError, match="as_strided in the model reads memory"):
        capture(model, model.inputs())
