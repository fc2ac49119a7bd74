"""Transforms, flows, forces, volumes, grids, scans, and losses that are not cross-entropy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any]]
BATCH, LENGTH, WIDTH = 8, 16, 8


class Applied(nn.Module):
    """A linear layer, a function of its result, a linear layer; the loss is squared error or what the function says."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.outer(self.function(self.inner(x), **dict(self.named_parameters(recurse=False)))), y)


def _applied(function: Callable[..., Tensor], **parameters: tuple[int, ...]) -> Callable[[], Built]:
    def build() -> Built:
        made = {name: torch.randn(shape) * 0.3 for name, shape in parameters.items()}
        shape = (BATCH, LENGTH, WIDTH)
        return Applied(function, **made), {"x": torch.randn(shape), "y": torch.randn(shape)}

    return build


def _fnet(x: Tensor) -> Tensor:
    return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


def _filtered(x: Tensor, real: Tensor, imag: Tensor) -> Tensor:
    return torch.fft.irfft(
        torch.fft.rfft(x, dim=1, norm="ortho") * torch.complex(real, imag), n=LENGTH, dim=1, norm="ortho"
    )


def _long_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    size = 2 * LENGTH
    made = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(made, n=size)[..., :LENGTH].transpose(1, 2)


class Spectral(nn.Module):
    """A Fourier neural operator's layer: low modes meet complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 4, 3, 2) * 0.1)
        self.skip = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", f[:, :, :4, :3], torch.view_as_complex(self.weight))
        out = torch.zeros(x.shape[0], WIDTH, x.shape[-2], x.shape[-1] // 2 + 1, dtype=f.dtype, device=x.device)
        out[:, :, :4, :3] = low
        return F.mse_loss(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x)), y)


def _spectral() -> Built:
    return Spectral(), {"x": torch.randn(BATCH, WIDTH, 8, 8), "y": torch.randn(BATCH, WIDTH, 8, 8)}


class Spectrogram(nn.Module):
    """The magnitudes of short windows of a wave."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.layer = nn.Linear(9, 4)

    def forward(self, wave: Tensor, y: Tensor) -> Tensor:
        made = torch.stft(wave, 16, hop_length=8, window=self.window, return_complex=True)
        return F.cross_entropy(self.layer((made.abs() + 1e-3).log().mean(-1)), y)


def _spectrogram() -> Built:
    return Spectrogram(), {"wave": torch.randn(BATCH, 64), "y": torch.randint(0, 4, (BATCH,))}


class Flow(nn.Module):
    """A normalising flow: an invertible mix of channels and a coupling layer (Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])
        self.net = nn.Sequential(nn.Linear(WIDTH // 2, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        determinant = torch.linalg.slogdet(self.mix)[1]
        first, second = (x @ self.mix).chunk(2, -1)
        scale, shift = self.net(first).chunk(2, -1)
        z = torch.cat([first, second * torch.exp(torch.tanh(scale)) + shift], -1)
        prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
        return -(prior.log_prob(z).sum(-1) + torch.tanh(scale).sum(-1) + determinant).mean()


class Forces(nn.Module):
    """Energies of pairs of atoms and the forces that are their gradients, both trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
        self.register_buffer("centres", torch.linspace(0.0, 3.0, 8))

    def forward(self, positions: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        apart = ((positions[:, :, None] - positions[:, None]).square().sum(-1) + 1e-3).sqrt()
        found = self.net(torch.exp(-(apart[..., None] - self.centres).square())).sum((1, 2, 3))
        (gradient,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
        return F.mse_loss(found, energy) + F.mse_loss(-gradient, forces)


def _forces() -> Built:
    shape = (BATCH, 5, 3)
    return Forces(), {"positions": torch.randn(shape), "energy": torch.randn(BATCH), "forces": torch.randn(shape)}


def _distances(x: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(x, x + 0.1)) @ x


class Volumes(nn.Module):
    """A small U-Net over volumes: 3-D convolution, pools, a norm, transposed convolution, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1)
        self.norm, self.up = nn.InstanceNorm3d(8, affine=True), nn.ConvTranspose3d(8, 8, 2, stride=2)
        self.last = nn.Conv3d(16, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        low = F.relu(self.second(F.max_pool3d(x, 2)))
        low = low + F.interpolate(F.avg_pool3d(low, 2), scale_factor=2, mode="trilinear")
        return F.mse_loss(self.last(torch.cat([x, self.up(low)], 1)), y)


def _volumes() -> Built:
    return Volumes(), {"x": torch.randn(BATCH, 2, 4, 4, 4), "y": torch.randn(BATCH, 2, 4, 4, 4)}


class Images(nn.Module):
    """Between two convolutions of images, a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 8) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.last(self.function(self.first(x)))
        return F.mse_loss(made, y[:, :, : made.shape[-2], : made.shape[-1]])


def _images(function: Callable[[Tensor], Tensor], channels: int = 8) -> Callable[[], Built]:
    given = lambda: {"x": torch.randn(BATCH, 3, 8, 8), "y": torch.randn(BATCH, 3, 16, 16)}  # noqa: E731
    return lambda: (Images(function, channels), given())


def _resized(mode: str, **kwargs: Any) -> Callable[[], Built]:
    return _images(lambda x: F.interpolate(x, scale_factor=2, mode=mode, **kwargs))


def _sampled(x: Tensor) -> Tensor:
    turn = torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.1]], dtype=x.dtype).expand(x.shape[0], 2, 3)
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def _folded(x: Tensor) -> Tensor:
    return F.fold(F.unfold(x, 2, stride=2) * 2, (8, 8), 2, stride=2)


def _patched(x: Tensor) -> Tensor:
    return x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))


class Transposed(nn.Module):
    """A transposed convolution with groups, of images and of rows."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1, groups=groups)
        self.row = nn.ConvTranspose1d(8, 3, 2, stride=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.row(F.elu(self.up(x)).flatten(2)), y)


def _transposed(groups: int) -> Callable[[], Built]:
    return lambda: (Transposed(groups), {"x": torch.randn(BATCH, 4, 4, 4), "y": torch.randn(BATCH, 3, 128)})


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    """A state space's recurrence by cumulative sums of logarithms."""
    logs = F.logsigmoid(decay).expand_as(x).cumsum(1)
    return torch.exp(logs) * torch.cumsum(x * torch.exp(-logs), 1)


def _products(x: Tensor) -> Tensor:
    return torch.cumprod(torch.sigmoid(x) + 0.5, 1) + torch.logcumsumexp(x, 1) + torch.cummax(x, 1).values


def _steps(x: Tensor, decay: Tensor) -> Tensor:
    """A state space's recurrence by a loop (Mamba as written)."""
    state, out = torch.zeros_like(x[:, 0]), []
    for step in range(4):
        state = state * torch.sigmoid(decay) + x[:, step]
        out.append(state)
    return torch.cat([torch.stack(out, 1), x[:, 4:]], 1)


def _doubling(x: Tensor, decay: Tensor) -> Tensor:
    """The same by doubling: an associative scan."""
    weight, shift = torch.sigmoid(decay).expand_as(x), 1
    while shift < LENGTH:
        x = x + weight * F.pad(x, (0, 0, shift, 0))[:, :LENGTH]
        weight, shift = weight * F.pad(weight, (0, 0, shift, 0), value=0.0)[:, :LENGTH], 2 * shift
    return x


class Classified(nn.Module):
    """A linear layer whose result goes into a loss."""

    def __init__(self, loss: Callable[..., Tensor], classes: int = 6) -> None:
        super().__init__()
        self.loss, self.layer = loss, nn.Linear(WIDTH, classes)
        self.register_buffer("weight", torch.rand(classes) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y, self.weight)


def _labelled(loss: Callable[..., Tensor]) -> Callable[[], Built]:
    return lambda: (Classified(loss), {"x": torch.randn(BATCH, WIDTH), "y": torch.randint(0, 6, (BATCH,))})


def _valued(loss: Callable[..., Tensor], shape: tuple[int, ...] = (BATCH, 6)) -> Callable[[], Built]:
    return lambda: (Classified(loss), {"x": torch.randn(BATCH, WIDTH), "y": torch.rand(shape)})


class Temporal(nn.Module):
    """A loss over alignments of a row of sounds with a row of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, letters: Tensor) -> Tensor:
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((BATCH,), LENGTH), torch.full((BATCH,), letters.shape[1])
        return F.ctc_loss(scores, letters, *sizes)


def _temporal() -> Built:
    return Temporal(), {"x": torch.randn(BATCH, LENGTH, WIDTH), "letters": torch.randint(1, 6, (BATCH, 4))}


SCIENCE: dict[str, Callable[[], Built]] = {
    "fnet": _applied(_fnet),
    "filtered": _applied(_filtered, real=(LENGTH // 2 + 1, WIDTH), imag=(LENGTH // 2 + 1, WIDTH)),
    "long convolution": _applied(_long_convolution, kernel=(WIDTH, LENGTH)),
    "spectral": _spectral,
    "spectrogram": _spectrogram,
    "flow": lambda: (Flow(), {"x": torch.randn(BATCH, WIDTH)}),
    "forces": _forces,
    "distances": _applied(_distances),
    "volumes": _volumes,
    "nearest": _resized("nearest"),
    "bilinear": _resized("bilinear", align_corners=False),
    "bicubic": _resized("bicubic"),
    "grid_sample": _images(_sampled),
    "pixel_shuffle": _images(lambda x: F.pixel_shuffle(x, 2), 2),
    "pixel_unshuffle": _images(lambda x: F.pixel_unshuffle(x, 2), 32),
    "fold": _images(_folded),
    "unfold": _images(_patched),
    "transposed": _transposed(1),
    "transposed, grouped": _transposed(2),
    "scan": _applied(_scan, decay=(WIDTH,)),
    "cumulative products": _applied(_products),
    "scan by steps": _applied(_steps, decay=(WIDTH,)),
    "scan by doubling": _applied(_doubling, decay=(WIDTH,)),
}
LOSSES: dict[str, Callable[[], Built]] = {
    "weighted cross entropy": _labelled(lambda z, y, w: F.cross_entropy(z, y, weight=w, label_smoothing=0.1)),
    "nll": _labelled(lambda z, y, w: F.nll_loss(z.log_softmax(-1), y, weight=w)),
    "bce": _valued(lambda z, y, w: F.binary_cross_entropy_with_logits(z, y.round(), pos_weight=w)),
    "bce of rates": _valued(lambda z, y, w: F.binary_cross_entropy(z.sigmoid(), y.round(), weight=w)),
    "soft labels": _valued(lambda z, y, w: F.cross_entropy(z, y / y.sum(-1, keepdim=True))),
    "kl_div": _valued(lambda z, y, w: F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean")),
    "huber": _valued(lambda z, y, w: F.huber_loss(z, y) + F.smooth_l1_loss(z, y) + F.l1_loss(z, y)),
    "triplet": _valued(lambda z, y, w: F.triplet_margin_loss(z, y, y.flip(-1))),
    "cosine": _valued(lambda z, y, w: F.cosine_embedding_loss(z, y, (y[:, 0] > 0.5) * 2.0 - 1)),
    "margins": _valued(
        lambda z, y, w: (
            F.margin_ranking_loss(z, y, (y > 0.5) * 2.0 - 1) + F.hinge_embedding_loss(z, (y > 0.5) * 2.0 - 1)
        )
    ),
    "gaussian": _valued(lambda z, y, w: F.gaussian_nll_loss(z, y, z.square() + 0.1, full=True)),
    "poisson": _valued(lambda z, y, w: F.poisson_nll_loss(z, y)),
    "ctc": _temporal,
}
