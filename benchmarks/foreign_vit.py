"""vit-pytorch: every kind of model that trains by itself, at 32 x 32 pixels (or as many frames, steps, voxels)."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, far, images

SIZES: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64,
    "dim_head": 8, "dropout": 0.1, "emb_dropout": 0.1, "cls_depth": 1, "seq_len": 32, "image_patch_size": 8,
    "frames": 4, "frame_patch_size": 2, "num_residual_streams": 2,
    "freq_patch_size": 8, "attn_dropout": 0.1, "ff_dropout": 0.1, "max_tokens_per_depth": (12, 8), "num_slots": 4,
}  # fmt: skip
FLAT, VIDEO = (3, 32, 32), (3, 4, 32, 32)
PYRAMID = {"dim": (32, 64, 64, 64), "depth": (1, 1, 1, 1), "image_size": 224}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    **{
        module: (f"{module}:{name}", {}, FLAT)
        for module, name in {
            "vit": "ViT", "simple_vit": "SimpleViT", "deepvit": "DeepViT", "cait": "CaiT", "parallel_vit": "ViT",
            "rvt": "RvT", "vit_5": "ViT", "xcit": "XCiT", "normalized_vit": "nViT",
            "jumbo_vit": "JumboViT", "simple_uvit": "SimpleUViT", "simple_flash_attn_vit": "SimpleViT",
            "simple_vit_attn_residual": "SimpleViTAttnResidual", "simple_vit_orthog_residual_update": "SimpleViT",
            "simple_vit_with_fft": "SimpleViT", "simple_vit_with_hyper_connections": "SimpleViT",
            "simple_vit_with_patch_dropout": "SimpleViT", "simple_vit_with_qk_norm": "SimpleViT",
            "simple_vit_with_register_tokens": "SimpleViT", "simple_vit_with_relative_proj_pos_bias": "SimpleViT",
            "simple_vit_with_sparse_gating": "SimpleViTWithSparseGating",
            "simple_vit_with_specialized_cls": "SimpleViT", "simple_vit_with_value_residual": "SimpleViT",
            "attn_residual_with_dca_simple_vit": "SimpleViT", "vit_detpool": "ViTDetPool", "vit_with_decorr": "ViT",
            "vit_for_small_dataset": "ViT", "vit_with_keel_post_ln": "ViT", "vit_with_patch_dropout": "ViT",
            "vit_with_patch_merger": "ViT", "learnable_memory_vit": "ViT", "wwt": "WWT", "ats_vit": "ViT",
        }.items()
    },
    "jet_vit": ("jet_vit:JetViT", {"window_size": 2}, FLAT),
    "looped_vit": ("looped_vit:LoopedViT", {"pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1,
                                            "ndim": 2}, FLAT),
    "look_vit": ("look_vit:LookViT", {"highres_patch_size": 8, "patch_size": 16, "cross_attn_heads": 2}, FLAT),
    "cct": ("cct:CCT", {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0,
                        "positional_embedding": "learnable"}, FLAT),
    "cct_3d": ("cct_3d:CCT", {"img_size": 32, "num_frames": 4, "embedding_dim": 32, "num_layers": 2, "num_heads": 4,
                              "mlp_ratio": 2.0, "positional_embedding": "learnable"}, VIDEO),
    "cross_vit": ("cross_vit:CrossViT", {"sm_dim": 32, "lg_dim": 48, "sm_patch_size": 8, "lg_patch_size": 16,
                                         "sm_enc_depth": 1, "lg_enc_depth": 1, "cross_attn_depth": 1}, FLAT),
    "crossformer": ("crossformer:CrossFormer", PYRAMID, (3, 224, 224)),
    "cvt": ("cvt:CvT", {"s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 32, "s2_heads": 2, "s3_heads": 2,
                        "s3_depth": 2}, FLAT),
    "levit": ("levit:LeViT", {"image_size": 224, "dim": (32, 32, 64), "depth": (1, 1, 1), "heads": (2, 2, 4),
                              "mlp_mult": 2}, (3, 224, 224)),
    "max_vit": ("max_vit:MaxViT", {"window_size": 2, "depth": (1, 1), "dim": 16}, (3, 32, 32)),
    "max_vit_with_registers": ("max_vit_with_registers:MaxViT", {"window_size": 2, "depth": (1, 1), "dim": 16}, FLAT),
    "nest": ("nest:NesT", {"num_hierarchies": 2, "block_repeats": (1, 1)}, FLAT),
    "pit": ("pit:PiT", {"depth": (1, 1), "image_size": 32, "patch_size": 8}, FLAT),
    "regionvit": ("regionvit:RegionViT", PYRAMID, (3, 224, 224)),
    "scalable_vit": ("scalable_vit:ScalableViT", {"dim": 16, "heads": (2, 2, 2, 2), "depth": (1, 1, 1, 1),
                                                  "reduction_factor": (8, 4, 2, 1), "window_size": (4, 4, 2, None)},
                     (3, 64, 64)),
    "sep_vit": ("sep_vit:SepViT", {"dim": 16, "depth": (1, 1, 1), "heads": (1, 2, 2)}, (3, 112, 112)),
    "t2t": ("t2t:T2TViT", {"t2t_layers": ((7, 4), (3, 2))}, FLAT),
    "twins_svt": ("twins_svt:TwinsSVT", {"s1_local_patch_size": 4, "s2_local_patch_size": 2, "s3_local_patch_size": 1,
                                         "s4_local_patch_size": 1, "s3_depth": 1, "s4_depth": 1,
                                         "s1_global_k": 4, "s2_global_k": 2, "s3_global_k": 1, "s4_global_k": 1},
                  (3, 64, 64)),
    "vit_1d": ("vit_1d:ViT", {}, (3, 32)),
    "simple_vit_1d": ("simple_vit_1d:SimpleViT", {}, (3, 32)),
    "vit_3d": ("vit_3d:ViT", {}, VIDEO),
    "simple_vit_3d": ("simple_vit_3d:SimpleViT", {}, VIDEO),
    "vivit": ("vivit:ViViT", {"spatial_depth": 1, "temporal_depth": 1}, VIDEO),
    "vivit_joint": ("vivit:ViViT", {"spatial_depth": 1, "temporal_depth": 1, "variant": "factorized_self_attention"},
                    VIDEO),
    "vivit_with_moss": ("vivit_with_moss:ViViT", {"spatial_depth": 1, "temporal_depth": 1}, VIDEO),
}  # fmt: skip
"""By name: module and class, what of `SIZES` is another, shape of a sample."""


def models() -> dict[str, Callable[[], Foreign]]:
    found: dict[str, Callable[[], Foreign]] = {name: partial(_make, *entry) for name, entry in MODELS.items()}
    wrapped = {"mp3": _mp3, "na_vit": _packed}
    wrapped |= {"dino": partial(_self_taught, "dino:Dino"), "es_vit": partial(_self_taught, "es_vit:EsViTTrainer")}
    wrapped |= {"lejepa": partial(_self_taught, "lejepa:LeJEPA"), "distill": _distilled, "efficient": _efficient}
    return found | wrapped


def _class(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)


def _built(path: str, **own: Any) -> nn.Module:
    kind = _class(path)
    known = set(inspect.signature(kind.__init__).parameters)
    sizes = {key: value for key, value in SIZES.items() if key in known} | own
    made: nn.Module = kind(**{key: value for key, value in sizes.items() if value is not None})
    return made


def _make(path: str, own: dict[str, Any], shape: tuple[int, ...]) -> Foreign:
    known = set(inspect.signature(_class(path).__init__).parameters)
    free = "kwargs" in known or "args" in known
    model = _built(path, **{k: v for k, v in own.items() if free or k in known})
    return Foreign(model=model, inputs=images(*shape), loss_fn=far)


def _mp3() -> Foreign:
    return Foreign(model=_class("mp3:MP3")(vit=_built("mp3:ViT"), masking_ratio=0.5), inputs=images(*FLAT))


def _packed() -> Foreign:
    def inputs() -> Any:
        return ([[torch.randn(3, 16, 16), torch.randn(3, 32, 16)], [torch.randn(3, 32, 32)]],)

    return Foreign(model=_built("na_vit:NaViT"), inputs=inputs, loss_fn=far)


def _self_taught(path: str) -> Foreign:
    sizes = {"image_size": 32, "hidden_layer": "to_latent", "projection_hidden_size": 32, "projection_layers": 2}
    kind = _class(path)
    if "es_vit" in path:
        own = {"s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 32, "s2_heads": 2, "s3_heads": 2, "s3_depth": 1}
        net = _built("cvt:CvT", **own)
        sizes["hidden_layer"] = "layers"
    else:
        net = _built("vit:ViT")
    return Foreign(model=kind(net, num_classes_K=48, **sizes), inputs=lambda: (torch.rand(BATCH, *FLAT),))


def _distilled() -> Foreign:
    model = _class("distill:DistillWrapper")(
        teacher=_built("vit:ViT"), student=_built("distill:DistillableViT", **_vit_sizes()), temperature=3, alpha=0.5
    )
    return Foreign(model=model, inputs=lambda: (torch.randn(BATCH, *FLAT), torch.randint(10, (BATCH,))))


def _efficient() -> Foreign:
    from linformer import Linformer

    inner = Linformer(dim=32, seq_len=17, depth=2, heads=4, k=8)
    return Foreign(model=_built("efficient:ViT", transformer=inner), inputs=images(*FLAT), loss_fn=far)


def _vit_sizes() -> dict[str, Any]:
    names = ("image_size", "patch_size", "num_classes", "dim", "depth", "heads", "mlp_dim", "dim_head")
    return {name: SIZES[name] for name in names}
