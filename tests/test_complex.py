"""Complex and sparse tensors of a model keep what they hold in every precision, and through every loader."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api.captures import captured_model
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.models import load_model
from autopar.values.calls import call_of
from autopar.values.precision import dtype_in, precision_of
from tests.as_eager import assert_as_eager, assert_shards_as_whole

WIDTH = 8
MODEL = """
import torch
from tests.test_complex import Spectral, inputs
def make(): return Spectral(), inputs()
"""


class Spectral(nn.Module):
    """A filter in the frequency domain, and a buffer of rotations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        angles = torch.arange(WIDTH // 2 + 1.0)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("carried", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter * self.rotation, n=WIDTH), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, WIDTH), "y": torch.randn(8, WIDTH)}


def test_complex_parameters_train_as_in_eager() -> None:
    assert_as_eager(Spectral(), inputs())


@pytest.mark.parametrize(("precision", "dtype"), [("fp64", torch.complex128), ("fp32", torch.complex64)])
def test_a_loaded_model_computes_the_loss_of_the_file(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    (tmp_path / "spectral.py").write_text(MODEL)
    loaded = load_model(f"{tmp_path}/spectral.py:make", precision=precision, device="cpu")
    assert {loaded.model.get_parameter("filter").dtype, loaded.model.get_buffer("rotation").dtype} == {dtype}
    expected = Spectral()(**inputs())
    torch.testing.assert_close(loaded.model(**loaded.kwargs).float(), expected)
    assert precision_of(loaded.model) == precision


def test_a_twin_in_another_precision_is_complex_too() -> None:
    captured, _ = captured_model(Spectral(), call_of(inputs()), "fp64")
    assert {spec.names[0]: spec.dtype for spec in captured.parameters}["filter"] == torch.complex128
    assert dtype_in(torch.complex64, torch.bfloat16) == torch.complex64


def test_shards_of_a_complex_model_are_the_whole() -> None:
    own = Spectral().double()
    del own.carried
    own.filter.data = Spectral().filter.data.to(torch.complex128)
    own.rotation = Spectral().get_buffer("rotation").to(torch.complex128)
    batch = {name: value.double() for name, value in inputs().items()}
    assert_shards_as_whole(capture(own, (), batch), own, batch, plans=2)


def test_memory_that_a_parameter_shares_with_another_tensor_is_refused() -> None:
    own = nn.Linear(WIDTH, WIDTH)
    own.register_buffer("row", own.weight.detach()[0])
    with pytest.raises(CaptureError, match="row of Linear shares memory with weight"):
        capture(own, (torch.randn(2, WIDTH),), loss_fn=lambda output: output.sum())
