"""diffusers: its noise predictors and autoencoders at widths of 16 to 64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, far, images

_NARROW: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_UNET = {"sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "num_class_embeds": None, **_NARROW}  # fmt: skip
_CROSS = {"cross_attention_dim": 32, "attention_head_dim": 8}
_CONDITIONED = {"sample_size": 16, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), **_NARROW, **_CROSS}  # fmt: skip
_SD3 = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 16, "pos_embed_max_size": 16}  # fmt: skip
_FLUX = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}  # fmt: skip
_CODED = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **_NARROW}


def _times(batch: int = BATCH) -> Tensor:
    return torch.randint(0, 1000, (batch,))


def _sampled(**more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": torch.randn(BATCH, 3, 16, 16), **{name: make() for name, make in more.items()}}


def _latents() -> Any:
    return torch.randn(BATCH, 4, 16, 16), _times(), torch.randn(BATCH, 7, 32)


def _noisy_and_text() -> Any:
    return torch.randn(BATCH, 4, 16, 16), torch.randn(BATCH, 6, 32), torch.randn(BATCH, 16), _times()


def _described() -> dict[str, Any]:
    mask = torch.ones(BATCH, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return {
        "hidden_states": torch.randn(BATCH, 4, 8, 8), "encoder_hidden_states": torch.randn(BATCH, 6, 16),
        "timestep": _times(), "encoder_attention_mask": mask,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def _packed(*more: str) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        ids = torch.stack([torch.zeros(16), torch.arange(16.0) // 4, torch.arange(16.0) % 4], dim=1)
        given = {
            "hidden_states": torch.randn(BATCH, 16, 4), "encoder_hidden_states": torch.randn(BATCH, 6, 32),
            "timestep": torch.rand(BATCH), "img_ids": ids, "txt_ids": torch.zeros(6, 3),
        }  # fmt: skip
        if "pooled_projections" in more:
            given["pooled_projections"] = torch.randn(BATCH, 16)
        if "guidance" in more:
            given["guidance"] = torch.full((BATCH,), 3.5)
        return given

    return inputs


def _masked() -> Any:
    mask = torch.ones(BATCH, 6, dtype=torch.bool)
    return torch.randn(BATCH, 4, 8, 8), torch.rand(BATCH), torch.randn(BATCH, 6, 16), mask


Entry = tuple[str, dict[str, Any], Callable[[], Any]]
MODELS: dict[str, Entry] = {
    "UNet2DModel": ("UNet2DModel", _UNET, _sampled(timestep=_times)),
    "UNet2DModel, classes": ("UNet2DModel", _UNET | {"num_class_embeds": 5}, _sampled(
        timestep=_times, class_labels=lambda: torch.randint(5, (BATCH,)),
    )),
    "UNet2DModel, scale shift": ("UNet2DModel", _UNET | {
        "resnet_time_scale_shift": "scale_shift", "dropout": 0.1,
    }, _sampled(timestep=_times)),
    "UNet2DConditionModel": ("UNet2DConditionModel", _CONDITIONED, _latents),
    "UNet2DConditionModel, linear projection": ("UNet2DConditionModel", _CONDITIONED | {
        "use_linear_projection": True,
    }, _latents),
    "UNet3DConditionModel": ("UNet3DConditionModel", {
        "sample_size": 8, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), **_NARROW, **_CROSS,
    }, lambda: (torch.randn(2, 4, 3, 16, 16), _times(2), torch.randn(2, 7, 32))),
    "UNetSpatioTemporalConditionModel": ("UNetSpatioTemporalConditionModel", {
        "sample_size": 16, "in_channels": 8, "block_out_channels": (32, 64), "layers_per_block": 1,
        "cross_attention_dim": 32, "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "num_attention_heads": (2, 4),
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24,
    }, lambda: (torch.randn(2, 2, 8, 16, 16), _times(2), torch.randn(2, 1, 32), torch.rand(2, 3))),
    "ControlNetModel": ("ControlNetModel", {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "conditioning_embedding_out_channels": (8, 16),
        **_NARROW, **_CROSS,
    }, lambda: (*_latents(), torch.rand(BATCH, 3, 32, 32))),
    "DiTTransformer2DModel": ("DiTTransformer2DModel", {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8,
        "norm_num_groups": 8, "num_embeds_ada_norm": 10, "dropout": 0.1,
    }, lambda: {"hidden_states": torch.randn(BATCH, 4, 8, 8), "timestep": _times(),
                "class_labels": torch.randint(10, (BATCH,))}),
    "PixArtTransformer2DModel": ("PixArtTransformer2DModel", {
        "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
        "cross_attention_dim": 32, "caption_channels": 16, "norm_num_groups": 8, "use_additional_conditions": False,
    }, _described),
    "SD3Transformer2DModel": ("SD3Transformer2DModel", _SD3, _noisy_and_text),
    "SD3Transformer2DModel, dual": ("SD3Transformer2DModel", _SD3 | {
        "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }, _noisy_and_text),
    **{
        f"FluxTransformer2DModel{', guidance' * guided}": ("FluxTransformer2DModel", _FLUX | {
            "guidance_embeds": guided, "pooled_projection_dim": 16,
        }, _packed("pooled_projections", *("guidance",) * guided))
        for guided in (False, True)
    },
    "ChromaTransformer2DModel": ("ChromaTransformer2DModel", _FLUX | {
        "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1,
    }, _packed()),
    "SanaTransformer2DModel": ("SanaTransformer2DModel", {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
        "caption_channels": 32, "sample_size": 8,
    }, lambda: (torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, 6, 32), _times())),
    "AuraFlowTransformer2DModel": ("AuraFlowTransformer2DModel", {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "out_channels": 4, "pos_embed_max_size": 64,
    }, lambda: (torch.randn(BATCH, 4, 16, 16), torch.randn(BATCH, 6, 32), torch.rand(BATCH))),
    "Lumina2Transformer2DModel": ("Lumina2Transformer2DModel", {
        "sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
        "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 2, 2),
        "axes_lens": (32, 32, 32), "cap_feat_dim": 16,
    }, _masked),
    "QwenImageTransformer2DModel": ("QwenImageTransformer2DModel", {
        "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 32, "axes_dims_rope": (8, 4, 4),
    }, lambda: {
        "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": torch.randn(BATCH, 6, 32),
        "encoder_hidden_states_mask": torch.ones(BATCH, 6, dtype=torch.int64), "timestep": torch.rand(BATCH),
        "img_shapes": [(1, 4, 4)] * BATCH,
    }),
    "WanTransformer3DModel": ("WanTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
        "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    }, lambda: (torch.randn(2, 4, 2, 16, 16), _times(2), torch.randn(2, 6, 16))),
    "CogVideoXTransformer3DModel": ("CogVideoXTransformer3DModel", {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16,
        "text_embed_dim": 16, "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 9,
        "max_text_seq_length": 6,
    }, lambda: (torch.randn(2, 3, 4, 8, 8), torch.randn(2, 6, 16), _times(2))),
    "LTXVideoTransformer3DModel": ("LTXVideoTransformer3DModel", {
        "in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
        "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16,
    }, lambda: {
        "hidden_states": torch.randn(2, 2 * 4 * 4, 8), "encoder_hidden_states": torch.randn(2, 6, 16),
        "timestep": _times(2), "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool),
        "num_frames": 2, "height": 4, "width": 4,
    }),
    "LatteTransformer3DModel": ("LatteTransformer3DModel", {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 1,
        "sample_size": 8, "patch_size": 2, "cross_attention_dim": 32, "caption_channels": 16,
        "norm_type": "ada_norm_single", "attention_bias": True, "norm_elementwise_affine": False, "video_length": 2,
        "num_embeds_ada_norm": 1000, "activation_fn": "gelu-approximate",
    }, lambda: (torch.randn(2, 4, 2, 8, 8), _times(2), torch.randn(2, 6, 16))),
    "StableAudioDiTModel": ("StableAudioDiTModel", {
        "sample_size": 16, "in_channels": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "num_key_value_attention_heads": 2, "out_channels": 8, "cross_attention_dim": 32, "time_proj_dim": 16,
        "global_states_input_dim": 16, "cross_attention_input_dim": 16,
    }, lambda: (torch.randn(2, 8, 16), torch.rand(2), torch.randn(2, 6, 16), torch.randn(2, 1, 16), None)),
    "AutoencoderKL": ("AutoencoderKL", _CODED, images(3, 16, 16)),
    "AutoencoderKL, sampled": ("AutoencoderKL", _CODED, _sampled(sample_posterior=lambda: True)),
    "VQModel": ("VQModel", _CODED | {"num_vq_embeddings": 16, "vq_embed_dim": 3}, images(3, 16, 16)),
    "AsymmetricAutoencoderKL": ("AsymmetricAutoencoderKL", {
        "down_block_out_channels": (16,), "up_block_out_channels": (16,), "norm_num_groups": 8,
    }, images(3, 16, 16)),
    "AutoencoderTiny": ("AutoencoderTiny", {
        "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
        "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
    }, images(3, 16, 16)),
    "AutoencoderOobleck": ("AutoencoderOobleck", {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2], "decoder_channels": 8,
        "decoder_input_channels": 4,
    }, images(2, 64)),
    "AutoencoderKLWan": ("AutoencoderKLWan", {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True],
        "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
    }, images(3, 5, 16, 16, batch=2)),
    "AutoencoderKLTemporalDecoder": ("AutoencoderKLTemporalDecoder", {
        "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4,
    }, lambda: {"sample": torch.randn(4, 3, 16, 16), "num_frames": 2}),
}  # fmt: skip
"""By class name, with what differs from the plainest: the class, its arguments, and inputs of a call."""


def models() -> dict[str, Callable[[], Foreign]]:
    return {name: partial(_made, *entry) for name, entry in MODELS.items()}


def _made(kind: str, own: dict[str, Any], inputs: Callable[[], Any]) -> Foreign:
    import diffusers

    return Foreign(model=getattr(diffusers, kind)(**own), inputs=inputs, loss_fn=far)
