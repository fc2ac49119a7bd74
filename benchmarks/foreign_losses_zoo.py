"""Losses of packages over a small encoder, and likelihoods of torch.distributions, normflows, nflows and zuko."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as D

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, images

Models = dict[str, Callable[[], Foreign]]
SAMPLES, WIDTH = 8, 16


class Trained(nn.Module):
    """An encoder and a loss of what it gives, in one module."""

    def __init__(self, encoder: nn.Module, loss: Any, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.encoder = encoder
        self.loss = loss
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.encoder, self.loss, *inputs)


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))


def _trained(make: Callable[[], Any], function: Callable[..., Tensor], inputs: Callable[[], Any]) -> Foreign:
    return Foreign(model=Trained(_encoder(), make(), function), inputs=inputs)


def _pair() -> Any:
    return torch.randn(SAMPLES, 12), torch.randn(SAMPLES, 12)


def _labelled() -> Any:
    return torch.randn(SAMPLES, 12), torch.arange(SAMPLES) % 3


def models() -> Models:
    found: Models = {}
    for name in ("NTXentLoss", "VICRegLoss", "BarlowTwinsLoss", "DCLLoss", "NegativeCosineSimilarity"):
        found[f"lightly, {name}"] = partial(_lightly, name)
    found["lightly, NTXentLoss, memory bank"] = partial(_lightly, "NTXentLoss", memory_bank_size=(16, WIDTH))
    found["lightly, DINOLoss"] = _dino
    metric = (
        "TripletMarginLoss", "ContrastiveLoss", "NTXentLoss", "MultiSimilarityLoss", "CircleLoss", "SupConLoss",
        "ArcFaceLoss", "CosFaceLoss", "ProxyAnchorLoss", "ProxyNCALoss", "NormalizedSoftmaxLoss", "SoftTripleLoss",
        "LiftedStructureLoss", "NPairsLoss",
    )  # fmt: skip
    for name in metric:
        found[f"pytorch-metric-learning, {name}"] = partial(_metric, name)
    found |= {"info-nce-pytorch": _info_nce, "pytorch-msssim": _msssim, "geomloss, sinkhorn": _geom}
    for name in ("SSIMLoss", "TotalVariation", "PSNRLoss", "MS_SSIMLoss", "CharbonnierLoss"):
        found[f"kornia, {name}"] = partial(_kornia, name)
    for name in ("DiceLoss", "FocalLoss", "GeneralizedDiceLoss", "TverskyLoss", "SSIMLoss"):
        found[f"monai, {name}"] = partial(_monai, name)
    for name in ("entmax15", "sparsemax", "entmax_bisect"):
        found[f"entmax, {name}"] = partial(_entmax, name)
    found["pytorch-crf"] = _crf
    for name in LIKELIHOODS:
        found[f"torch.distributions, {name}"] = partial(_likelihood, name)
    found |= {"torch.distributions, VAE": _vae, "torch.distributions, mixture": _mixture}
    found |= {f"zuko, {name}": partial(_zuko, name) for name in ("MAF", "NSF", "NICE", "GMM", "NAF", "CNF")}
    found |= {
        f"normflows, {name}": partial(_normflows, name) for name in ("real-NVP", "real-NVP, ActNorm", "NSF", "glow")
    }
    found |= {f"nflows, {name}": partial(_nflows, name) for name in ("MAF", "coupling splines", "ActNorm")}
    return found


def _lightly(name: str, **own: Any) -> Foreign:
    from lightly import loss

    return _trained(lambda: getattr(loss, name)(**own), lambda net, loss, a, b: loss(net(a), net(b)), _pair)


def _dino() -> Foreign:
    from lightly.loss import DINOLoss

    def joined(net: Any, loss: Any, one: Tensor, two: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = [net(one), net(two)]
        out: Tensor = loss(teacher, [net(one), net(two)], epoch=0)
        return out

    return _trained(lambda: DINOLoss(output_dim=WIDTH), joined, _pair)


def _metric(name: str) -> Foreign:
    from pytorch_metric_learning import losses

    own = {"num_classes": 3, "embedding_size": WIDTH} if hasattr(losses, name) and name in (
        "ArcFaceLoss", "CosFaceLoss", "ProxyAnchorLoss", "ProxyNCALoss", "NormalizedSoftmaxLoss", "SoftTripleLoss"
    ) else {}  # fmt: skip
    make = getattr(losses, name)
    return _trained(lambda: make(**own), lambda net, loss, x, labels: loss(net(x), labels), _labelled)


def _info_nce() -> Foreign:
    from info_nce import InfoNCE

    return _trained(InfoNCE, lambda net, loss, a, b: loss(net(a), net(b)), _pair)


def _geom() -> Foreign:
    from geomloss import SamplesLoss

    return _trained(lambda: SamplesLoss("sinkhorn", blur=0.5), lambda net, loss, a, b: loss(net(a), net(b)), _pair)


def _image_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())


def _msssim() -> Foreign:
    from pytorch_msssim import SSIM

    def function(net: Any, loss: Any, x: Tensor) -> Tensor:
        return 1 - loss(net(x), x)

    model = Trained(_image_net(), SSIM(data_range=1.0, win_size=5), function)
    return Foreign(model=model, inputs=lambda: (torch.rand(BATCH, 3, 16, 16),))


def _kornia(name: str) -> Foreign:
    from kornia import losses

    own = {"SSIMLoss": {"window_size": 5}, "PSNRLoss": {"max_val": 1.0}}.get(name, {})
    make = getattr(losses, name)

    def function(net: Any, loss: Any, x: Tensor) -> Tensor:
        out: Tensor = loss(net(x)) if name == "TotalVariation" else loss(net(x), x)
        return out.mean()

    size = 64 if name == "MS_SSIMLoss" else 16
    model = Trained(_image_net(), make(**own), function)
    return Foreign(model=model, inputs=lambda: (torch.rand(2, 3, size, size),))


def _monai(name: str) -> Foreign:
    from monai import losses

    own: dict[str, Any] = {"spatial_dims": 2} if name == "SSIMLoss" else {"to_onehot_y": True}
    if name in ("DiceLoss", "GeneralizedDiceLoss", "TverskyLoss"):
        own["softmax"] = True
    make = getattr(losses, name)

    def function(net: Any, loss: Any, x: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = loss(net(x), x) if name == "SSIMLoss" else loss(net(x), labels)
        return out

    def inputs() -> Any:
        return torch.rand(BATCH, 3, 16, 16), torch.randint(3, (BATCH, 1, 16, 16))

    return Foreign(model=Trained(_image_net(), make(**own), function), inputs=inputs)


def _entmax(name: str) -> Foreign:
    import entmax

    def function(net: Any, loss: Any, x: Tensor, labels: Tensor) -> Tensor:
        chances = loss(net(x), dim=-1)
        return (chances - torch.nn.functional.one_hot(labels, WIDTH)).square().sum(-1).mean()

    return _trained(lambda: getattr(entmax, name), function, _labelled)


def _crf() -> Foreign:
    from torchcrf import CRF

    def function(net: Any, loss: Any, x: Tensor, tags: Tensor) -> Tensor:
        return -loss(net(x), tags, reduction="mean")

    model = Trained(nn.Linear(12, 5), CRF(5, batch_first=True), function)
    return Foreign(model=model, inputs=lambda: (torch.randn(BATCH, 6, 12), torch.randint(5, (BATCH, 6))))


LIKELIHOODS: dict[str, tuple[Callable[[Tensor], D.Distribution], Callable[[], Tensor]]] = {
    "Normal": (lambda h: D.Normal(h[..., 0], h[..., 1].exp()), lambda: torch.randn(SAMPLES)),
    "StudentT": (lambda h: D.StudentT(3.0, h[..., 0], h[..., 1].exp()), lambda: torch.randn(SAMPLES)),
    "Laplace": (lambda h: D.Laplace(h[..., 0], h[..., 1].exp()), lambda: torch.randn(SAMPLES)),
    "Gamma": (lambda h: D.Gamma(h[..., 0].exp(), h[..., 1].exp()), lambda: torch.rand(SAMPLES) + 0.1),
    "Beta": (lambda h: D.Beta(h[..., 0].exp(), h[..., 1].exp()), lambda: torch.rand(SAMPLES) * 0.8 + 0.1),
    "LogNormal": (lambda h: D.LogNormal(h[..., 0], h[..., 1].exp()), lambda: torch.rand(SAMPLES) + 0.1),
    "Weibull": (lambda h: D.Weibull(h[..., 0].exp(), h[..., 1].exp()), lambda: torch.rand(SAMPLES) + 0.1),
    "Poisson": (lambda h: D.Poisson(h[..., 0].exp()), lambda: torch.randint(5, (SAMPLES,)).float()),
    "NegativeBinomial": (
        lambda h: D.NegativeBinomial(h[..., 0].exp(), logits=h[..., 1]), lambda: torch.randint(5, (SAMPLES,)).float(),
    ),
    "Bernoulli": (lambda h: D.Bernoulli(logits=h[..., 0]), lambda: torch.randint(2, (SAMPLES,)).float()),
    "Binomial": (lambda h: D.Binomial(4, logits=h[..., 0]), lambda: torch.randint(5, (SAMPLES,)).float()),
    "Categorical": (lambda h: D.Categorical(logits=h), lambda: torch.randint(WIDTH, (SAMPLES,))),
    "Multinomial": (lambda h: D.Multinomial(4, logits=h[..., :2]), lambda: torch.tensor([[1.0, 3.0]] * SAMPLES)),
    "OneHotCategorical": (lambda h: D.OneHotCategorical(logits=h), lambda: torch.eye(WIDTH)[:SAMPLES]),
    "Dirichlet": (lambda h: D.Dirichlet(h[..., :3].exp()), lambda: torch.tensor([[0.2, 0.3, 0.5]] * SAMPLES)),
    "VonMises": (lambda h: D.VonMises(h[..., 0], h[..., 1].exp()), lambda: torch.randn(SAMPLES)),
    "MultivariateNormal": (
        lambda h: D.MultivariateNormal(h[..., :2], torch.diag_embed(h[..., 2:4].exp())),
        lambda: torch.randn(SAMPLES, 2),
    ),
    "LowRankMultivariateNormal": (
        lambda h: D.LowRankMultivariateNormal(h[..., :2], h[..., 2:4, None], h[..., 4:6].exp()),
        lambda: torch.randn(SAMPLES, 2),
    ),
    "Independent": (
        lambda h: D.Independent(D.Normal(h[..., :4], h[..., 4:8].exp()), 1), lambda: torch.randn(SAMPLES, 4),
    ),
    "Kumaraswamy": (lambda h: D.Kumaraswamy(h[..., 0].exp(), h[..., 1].exp()), lambda: torch.rand(SAMPLES) * 0.8 + 0.1),
    "tanh Normal": (
        lambda h: D.TransformedDistribution(D.Normal(h[..., 0], h[..., 1].exp()), [D.TanhTransform()]),
        lambda: torch.rand(SAMPLES) - 0.5,
    ),
}  # fmt: skip
"""A distribution of what a network gives, and what is seen."""


def _likelihood(name: str) -> Foreign:
    make, draw = LIKELIHOODS[name]

    def function(net: Any, loss: Any, x: Tensor, seen: Tensor) -> Tensor:
        return -make(net(x)).log_prob(seen).mean()

    return _trained(lambda: None, function, lambda: (torch.randn(SAMPLES, 12), draw()))


def _vae() -> Foreign:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(12, 8)
            self.decoder = nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            mean, log = self.encoder(x).chunk(2, dim=-1)
            posterior = D.Normal(mean, log.exp())
            prior = D.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            seen = D.Normal(self.decoder(posterior.rsample()), 1.0).log_prob(x).sum(-1)
            divergence: Tensor = D.kl_divergence(posterior, prior).sum(-1)
            return (divergence - seen).mean()

    return Foreign(model=VAE(), inputs=images(12, batch=SAMPLES))


def _mixture() -> Foreign:
    def function(net: Any, loss: Any, x: Tensor, seen: Tensor) -> Tensor:
        h = net(x)
        parts = D.Normal(h[:, :4], h[:, 4:8].exp())
        return -D.MixtureSameFamily(D.Categorical(logits=h[:, 8:12]), parts).log_prob(seen).mean()

    return _trained(lambda: None, function, lambda: (torch.randn(SAMPLES, 12), torch.randn(SAMPLES)))


def _zuko(name: str) -> Foreign:
    from zuko import flows

    own: dict[str, Any] = {"GMM": {"components": 3}}.get(name, {"hidden_features": (16, 16)})
    if name in ("MAF", "NSF", "NICE", "NAF"):
        own["transforms"] = 2
    if name == "NAF":
        own |= {"network": {"hidden_features": (8, 8)}}
    flow = getattr(flows, name)(3, 4, **own)
    return Foreign(model=Trained(flow, None, lambda f, _, x, c: -f(c).log_prob(x).mean()), inputs=lambda: (
        torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 4)
    ))  # fmt: skip


def _normflows(name: str) -> Foreign:
    import normflows as nf

    if name == "glow":
        flows = [[nf.flows.GlowBlock(12, 8, split_mode="channel", scale=True), nf.flows.Squeeze()]]
        base = [nf.distributions.DiagGaussian((12, 4, 4))]
        model = nf.MultiscaleFlow(base, flows, [])
        return Foreign(model=Trained(model, None, lambda f, _, x: f.forward_kld(x)), inputs=images(3, 8, 8))
    parts: list[Any] = []
    for _ in range(2):
        if name == "NSF":
            parts.append(nf.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8))
        else:
            parts.append(nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 16, 4], init_zeros=False)))
        if "ActNorm" in name:
            parts.append(nf.flows.ActNorm(4))
        parts.append(nf.flows.LULinearPermute(4))
    model = nf.NormalizingFlow(nf.distributions.DiagGaussian(4), parts)
    return Foreign(model=Trained(model, None, lambda f, _, x: f.forward_kld(x)), inputs=images(4, batch=SAMPLES))


def _nflows(name: str) -> Foreign:
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    parts: list[Any] = []
    for number in range(2):
        parts.append(transforms.RandomPermutation(features=4))
        if name == "coupling splines":
            parts.append(
                transforms.PiecewiseRationalQuadraticCouplingTransform(
                    [number % 2, 1 - number % 2, 0, 1],
                    lambda inputs, outputs: ResidualNet(inputs, outputs, hidden_features=8, num_blocks=1),
                    tails="linear", tail_bound=3.0, num_bins=4,
                )
            )  # fmt: skip
        else:
            parts.append(transforms.MaskedAffineAutoregressiveTransform(features=4, hidden_features=8))
        if name == "ActNorm":
            parts.append(transforms.ActNorm(4))
    flow = flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([4]))
    return Foreign(model=Trained(flow, None, lambda f, _, x: -f.log_prob(x).mean()), inputs=images(4, batch=SAMPLES))
