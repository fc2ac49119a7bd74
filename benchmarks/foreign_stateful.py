"""Packages whose training step keeps state, draws noise or solves: self-supervision, diffusion, spikes, Bayes, ODEs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, far, images, words
from benchmarks.foreign_losses_zoo import Trained

Models = dict[str, Callable[[], Foreign]]
WORDS, SEQ = 96, 16


def models() -> Models:
    found: Models = {"byol-pytorch": _byol, "electra-pytorch": _electra, "mambapy": _mamba, "x-transformers": _x}
    found |= {f"x-transformers, {', '.join(own)}": partial(_x, **own) for own in X_VARIANTS}
    found |= {"denoising-diffusion-pytorch": _diffusion, "denoising-diffusion-pytorch, min SNR": partial(
        _diffusion, min_snr_loss_weight=True
    )}  # fmt: skip
    found |= {f"snntorch, {name}": partial(_spikes, name) for name in ("Leaky", "Synaptic", "Alpha")}
    found |= {"bayesian-torch": _bayes, "blitz": _blitz, "hyper-connections": _hyper, "rotary-embedding": _rotary}
    found |= {f"torchdiffeq, {method}": partial(_ode, method) for method in ("rk4", "euler", "dopri5")}
    found |= {"torchdiffeq, adjoint": partial(_ode, "rk4", adjoint=True), "torchsde": _sde}
    found |= {"e3nn": _equivariant, "ptwt, wavelets": _wavelets, "pytorch-metric-learning, miner": _mined}
    return found


X_VARIANTS: tuple[dict[str, Any], ...] = (
    {"rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True},
    {"alibi_pos_bias": True},
    {"rel_pos_bias": True},
    {"attn_pre_talking_heads": True, "sandwich_norm": True},
    {"attn_num_mem_kv": 4, "macaron": True},
    {"attn_sparse_topk": 4},
    {"layer_dropout": 0.2, "attn_dropout": 0.1},
    {"shift_tokens": 1, "residual_attn": True},
    {"attn_qk_norm": True, "attn_one_kv_head": True},
    {"dynamic_pos_bias": True, "scale_residual": True},
)


def _x(**own: Any) -> Foreign:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **own)
    net = TransformerWrapper(num_tokens=WORDS, max_seq_len=SEQ, attn_layers=layers, emb_dropout=0.1)
    return Foreign(model=AutoregressiveWrapper(net), inputs=words(SEQ, WORDS))


def _byol() -> Foreign:
    from byol_pytorch import BYOL
    from vit_pytorch import ViT

    net = ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=32)
    model = BYOL(net, image_size=32, hidden_layer="to_latent", projection_size=16, projection_hidden_size=32)
    return Foreign(model=model, inputs=lambda: (torch.rand(BATCH, 3, 32, 32),))


class _Bert(nn.Module):
    def __init__(self, logits: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, WORDS if logits else 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embedding(ids)))
        return out


def _electra() -> Foreign:
    from electra_pytorch import Electra

    model = Electra(_Bert(True), _Bert(False), mask_token_id=2, pad_token_id=0, mask_prob=0.3)
    return Foreign(model=model, inputs=lambda: (torch.randint(3, WORDS, (BATCH, SEQ)),), loss_fn=lambda out: out.loss)


def _mamba() -> Foreign:
    from mambapy.mamba import Mamba, MambaConfig

    return Foreign(model=Mamba(MambaConfig(d_model=16, n_layers=2)), inputs=images(8, 16), loss_fn=far)


def _diffusion(**own: Any) -> Foreign:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    model = GaussianDiffusion(net, image_size=16, timesteps=20, **own)
    return Foreign(model=model, inputs=lambda: (torch.rand(BATCH, 3, 16, 16),))


def _spikes(name: str) -> Foreign:
    import snntorch

    kind = getattr(snntorch, name)
    own = {"Leaky": {"beta": 0.9}, "Synaptic": {"alpha": 0.8, "beta": 0.9}, "Alpha": {"alpha": 0.9, "beta": 0.8}}[name]
    first, last = kind(init_hidden=True, **own), kind(init_hidden=True, output=True, **own)
    net = nn.Sequential(nn.Linear(12, 16), first, nn.Linear(16, 4), last)

    def function(net: Any, _: Any, x: Tensor) -> Tensor:
        from snntorch import utils

        utils.reset(net)
        steps = [net(x)[-1] for _ in range(3)]
        return torch.stack(steps).square().mean()

    return Foreign(model=Trained(net, None, function), inputs=images(12))


def _bayes() -> Foreign:
    from bayesian_torch.layers import LinearReparameterization

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = LinearReparameterization(12, 16)
            self.last = LinearReparameterization(16, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, one = self.first(x)
            out, two = self.last(h.relu())
            return out, one + two

    return Foreign(model=Net(), inputs=images(12), loss_fn=far)


def _blitz() -> Foreign:
    from blitz.modules import BayesianLinear

    return Foreign(
        model=nn.Sequential(BayesianLinear(12, 16), nn.ReLU(), BayesianLinear(16, 2)), inputs=images(12), loss_fn=far
    )


def _hyper() -> Foreign:
    from hyper_connections import get_init_and_expand_reduce_stream_functions

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make, self.expand, self.reduce = get_init_and_expand_reduce_stream_functions(2)
            self.first = make(dim=32, branch=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)))
            self.second = make(dim=32, branch=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.reduce(self.second(self.first(self.expand(x))))
            return out

    return Foreign(model=Net(), inputs=images(SEQ, 32), loss_fn=far)


def _rotary() -> Foreign:
    from rotary_embedding_torch import RotaryEmbedding

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=8, use_xpos=False, cache_if_possible=True)
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Foreign(model=Net(), inputs=images(SEQ, 32), loss_fn=far)


class _Field(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.noise = nn.Linear(4, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.net(y)
        return out

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.forward(t, y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.noise(y).sigmoid()
        return out


def _ode(method: str, adjoint: bool = False) -> Foreign:
    import torchdiffeq

    solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint

    def function(field: Any, _: Any, x: Tensor) -> Tensor:
        times = torch.linspace(0.0, 1.0, 4, dtype=x.dtype)
        out: Tensor = solve(field, x, times, method=method)
        return out.square().mean()

    return Foreign(model=Trained(_Field(), None, function), inputs=images(4))


def _sde() -> Foreign:
    import torchsde

    def function(field: Any, _: Any, x: Tensor) -> Tensor:
        times = torch.linspace(0.0, 1.0, 3, dtype=x.dtype)
        out: Tensor = torchsde.sdeint(field, x, times, dt=0.25, method="euler")
        return out.square().mean()

    return Foreign(model=Trained(_Field(), None, function), inputs=images(4))


def _equivariant() -> Foreign:
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = o3.Linear("4x0e + 2x1o", "4x0e + 2x1o")
            self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "3x0e")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            directions = o3.spherical_harmonics([0, 1], y, normalize=True)
            out: Tensor = self.product(self.linear(x), directions)
            return out

    return Foreign(model=Net(), inputs=lambda: (torch.randn(BATCH, 10), torch.randn(BATCH, 3)), loss_fn=far)


def _wavelets() -> Foreign:
    import ptwt
    import pywt

    def function(net: Any, _: Any, x: Tensor) -> Tensor:
        parts = ptwt.wavedec(net(x), pywt.Wavelet("haar"), level=2)
        return torch.stack([(part - 1).square().mean() for part in parts]).sum()

    return Foreign(model=Trained(nn.Linear(12, 16), None, function), inputs=images(12))


def quantized(kind: str, **own: Any) -> nn.Module:
    """An autoencoder with a codebook of vector-quantize-pytorch; its forward gives what the quantizer gives."""
    import vector_quantize_pytorch

    quantizer = getattr(vector_quantize_pytorch, kind)(**own)

    def function(net: Any, quantizer: Any, x: Tensor) -> Any:
        found = quantizer(net["encode"](x))
        first, *others = found if isinstance(found, tuple) else (found,)
        return net["decode"](first), others

    return Trained(nn.ModuleDict({"encode": nn.Linear(16, 16), "decode": nn.Linear(16, 16)}), quantizer, function)


def _mined() -> Foreign:
    from pytorch_metric_learning import losses, miners

    miner = miners.MultiSimilarityMiner()

    def function(net: Any, loss: Any, x: Tensor, labels: Tensor) -> Tensor:
        embedded = net(x)
        out: Tensor = loss(embedded, labels, miner(embedded, labels))
        return out

    model = Trained(nn.Linear(12, 16), losses.TripletMarginLoss(), function)
    return Foreign(model=model, inputs=lambda: (torch.randn(8, 12), torch.arange(8) % 3))
