"""What the exported train.py trains on before anybody puts data there: values like those of the example inputs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.export.synthetic import synthetic
from tests.test_cli import PLAN, run

MASKED = """
import torch
from torch import nn

class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x).masked_fill(mask == 0, float("-inf")).softmax(-1).square().mean()

def masked():
    return Masked(4, 4), {"x": torch.randn(8, 4), "mask": torch.ones(8, 4, dtype=torch.long)}
"""

SYNTHETIC = [
    (None, 7, "torch.randint(7, (2, 3), dtype=torch.int64, generator=generator)"),
    (torch.ones(2, 3, dtype=torch.int64, device="meta"), None, "torch.randint(2, (2, 3), dtype=torch.int64"),
    (torch.ones(2, 3, dtype=torch.int64), None, "torch.ones((2, 3), dtype=torch.int64)"),
    (torch.tensor([[1, 1, 0]]), None, "torch.ones((2, 3), dtype=torch.int64)"),
    (torch.tensor([[1, 1, 0]]), 2, "torch.randint(2, (2, 3), dtype=torch.int64, generator=generator)"),
    (torch.tensor([[4, -100, 9]]), 50, "torch.randint(4, 10, (2, 3), dtype=torch.int64, generator=generator)"),
    (torch.full((2, 3), -100), 50, "torch.full((2, 3), -100, dtype=torch.int64)"),
    (torch.tensor([[False, False, True]]), None, "torch.zeros((2, 3), dtype=torch.bool)"),
    (torch.tensor([[True, False, True]]), None, "torch.ones((2, 3), dtype=torch.bool)"),
]


@pytest.mark.parametrize(("example", "limit", "source"), SYNTHETIC)
def test_synthetic_data_are_like_the_example_inputs(example: Tensor | None, limit: int | None, source: str) -> None:
    """A mask of ones stays one: drawn, it would mask whole rows, whose loss is nan. -100 is no label to draw."""
    dtype = torch.int64 if example is None else example.dtype
    made = synthetic((2, 3), dtype, limit, example)
    assert made.startswith(source)
    drawn = eval(made, {"torch": torch, "generator": torch.Generator().manual_seed(0)})
    assert drawn.shape == (2, 3) and drawn.dtype == dtype


def test_export_reads_the_example_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`plan` builds the model without memory, and builds it again for an export."""
    (tmp_path / "net.py").write_text(MASKED)
    asked = ("plan", f"{tmp_path / 'net.py'}:masked", *PLAN, "--no-check", "--out", tmp_path / "a", "--json")
    assert run(capsys, *asked)[0] == 0
    assert '"mask": torch.ones((8, 4), dtype=torch.int64)' in (tmp_path / "a" / "train.py").read_text()
