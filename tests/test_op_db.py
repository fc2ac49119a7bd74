"""torch's own samples of a few ops, captured and run, are what eager computes; `benchmarks.op_db` runs all of them."""

import pytest

from benchmarks.op_db_samples import outcomes, samples_of

pytest.importorskip("expecttest")

WERE_WRONG = (
    "diag_embed", "arange", "linspace", "istft", "geqrf", "as_strided", "nn.functional.pad.constant", "index_put",
    "nn.functional.binary_cross_entropy_with_logits", "nn.functional.kl_div", "narrow", "slice_scatter",
)  # fmt: skip
OTHERS = (
    "cat", "gather", "softmax", "sum", "std_mean", "einsum", "conj", "nn.functional.cosine_similarity",
    "nn.functional.conv2d", "nn.functional.layer_norm", "index_add", "logsumexp",
)  # fmt: skip


@pytest.mark.parametrize("op", [*WERE_WRONG, *OTHERS])
@pytest.mark.filterwarnings("ignore")
def test_an_op_computes_what_eager_does(op: str) -> None:
    found = [(str(sample.key), outcome) for sample, outcome in outcomes(samples_of("op", op, 3))]
    assert any(outcome.kind == "equal" for _, outcome in found)
    assert [row for row in found if row[1].kind not in ("equal", "skipped", "refused")] == []
