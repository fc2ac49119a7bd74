"""diffusers: its noise predictors and autoencoders at widths of 16 to 64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, far, images

Models = dict[str, Callable[[], Foreign]]
_NARROW: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_CROSS = {"cross_attention_dim": 32, "attention_head_dim": 8}


def models() -> Models:
    """By class name, with what differs from the plainest."""
    return {
        "UNet2DModel": _unet,
        "UNet2DModel, classes": partial(_unet, classes=True),
        "UNet2DModel, scale shift": partial(_unet, resnet_time_scale_shift="scale_shift", dropout=0.1),
        "UNet2DConditionModel": _conditioned,
        "UNet2DConditionModel, linear projection": partial(_conditioned, use_linear_projection=True),
        "UNet3DConditionModel": _video_unet,
        "UNetSpatioTemporalConditionModel": _spatio_temporal,
        "ControlNetModel": _controlnet,
        "DiTTransformer2DModel": _dit,
        "PixArtTransformer2DModel": _pixart,
        "SD3Transformer2DModel": _sd3,
        "SD3Transformer2DModel, dual": partial(_sd3, dual_attention_layers=(0,), qk_norm="rms_norm"),
        "FluxTransformer2DModel": partial(_flux, "FluxTransformer2DModel"),
        "FluxTransformer2DModel, guidance": partial(_flux, "FluxTransformer2DModel", guidance=True),
        "ChromaTransformer2DModel": partial(_flux, "ChromaTransformer2DModel"),
        "SanaTransformer2DModel": _sana,
        "AuraFlowTransformer2DModel": _aura,
        "Lumina2Transformer2DModel": _lumina,
        "QwenImageTransformer2DModel": _qwen,
        "WanTransformer3DModel": _wan,
        "CogVideoXTransformer3DModel": _cogvideo,
        "LTXVideoTransformer3DModel": _ltx,
        "LatteTransformer3DModel": _latte,
        "StableAudioDiTModel": _stable_audio,
        "AutoencoderKL": partial(_autoencoder, "AutoencoderKL", **_NARROW),
        "AutoencoderKL, sampled": partial(_autoencoder, "AutoencoderKL", sampled=True, **_NARROW),
        "VQModel": partial(_autoencoder, "VQModel", num_vq_embeddings=16, vq_embed_dim=3, **_NARROW),
        "AsymmetricAutoencoderKL": partial(
            _autoencoder,
            "AsymmetricAutoencoderKL",
            down_block_out_channels=(16,),
            up_block_out_channels=(16,),
            norm_num_groups=8,
        ),
        "AutoencoderTiny": partial(
            _autoencoder,
            "AutoencoderTiny",
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        "AutoencoderOobleck": _oobleck,
        "AutoencoderKLWan": _wan_autoencoder,
        "AutoencoderKLTemporalDecoder": partial(_temporal, "AutoencoderKLTemporalDecoder"),
    }


def _kind(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)


def _times(batch: int = BATCH) -> Tensor:
    return torch.randint(0, 1000, (batch,))


def _unet(classes: bool = False, **own: Any) -> Foreign:
    model = _kind("UNet2DModel")(
        sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), num_class_embeds=5 if classes else None, **_NARROW, **own,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        labels = {"class_labels": torch.randint(5, (BATCH,))} if classes else {}
        return {"sample": torch.randn(BATCH, 3, 16, 16), "timestep": _times(), **labels}

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _conditioned(**own: Any) -> Foreign:
    model = _kind("UNet2DConditionModel")(
        sample_size=16, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **_NARROW, **_CROSS, **own,
    )  # fmt: skip
    return Foreign(
        model=model, inputs=lambda: (torch.randn(BATCH, 4, 16, 16), _times(), torch.randn(BATCH, 7, 32)), loss_fn=far
    )


def _video_unet() -> Foreign:
    model = _kind("UNet3DConditionModel")(
        sample_size=8, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), **_NARROW, **_CROSS,
    )  # fmt: skip
    return Foreign(
        model=model, inputs=lambda: (torch.randn(2, 4, 3, 16, 16), _times(2), torch.randn(2, 7, 32)), loss_fn=far
    )


def _spatio_temporal() -> Foreign:
    model = _kind("UNetSpatioTemporalConditionModel")(
        sample_size=16, in_channels=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), num_attention_heads=(2, 4),
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=24,
    )  # fmt: skip
    return Foreign(
        model=model,
        inputs=lambda: (torch.randn(2, 2, 8, 16, 16), _times(2), torch.randn(2, 1, 32), torch.rand(2, 3)),
        loss_fn=far,
    )


def _controlnet() -> Foreign:
    model = _kind("ControlNetModel")(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), conditioning_embedding_out_channels=(8, 16),
        **_NARROW, **_CROSS,
    )  # fmt: skip

    def inputs() -> Any:
        return torch.randn(BATCH, 4, 16, 16), _times(), torch.randn(BATCH, 7, 32), torch.rand(BATCH, 3, 32, 32)

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _dit() -> Foreign:
    model = _kind("DiTTransformer2DModel")(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8,
        num_embeds_ada_norm=10, dropout=0.1,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        labels = torch.randint(10, (BATCH,))
        return {"hidden_states": torch.randn(BATCH, 4, 8, 8), "timestep": _times(), "class_labels": labels}

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _pixart() -> Foreign:
    model = _kind("PixArtTransformer2DModel")(
        num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8, cross_attention_dim=32,
        caption_channels=16, norm_num_groups=8, use_additional_conditions=False,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        mask = torch.ones(BATCH, 6, dtype=torch.int64)
        mask[1, 4:] = 0
        return {
            "hidden_states": torch.randn(BATCH, 4, 8, 8), "encoder_hidden_states": torch.randn(BATCH, 6, 16),
            "timestep": _times(), "encoder_attention_mask": mask,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }  # fmt: skip

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _sd3(**own: Any) -> Foreign:
    model = _kind("SD3Transformer2DModel")(
        sample_size=16, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=16, **own,
    )  # fmt: skip

    def inputs() -> Any:
        return torch.randn(BATCH, 4, 16, 16), torch.randn(BATCH, 6, 32), torch.randn(BATCH, 16), _times()

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _flux(name: str, guidance: bool = False) -> Foreign:
    chroma = name.startswith("Chroma")
    own: dict[str, Any] = {"guidance_embeds": guidance, "pooled_projection_dim": 16}
    if chroma:
        own = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    model = _kind(name)(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), **own,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        ids = torch.stack([torch.zeros(16), torch.arange(16.0) // 4, torch.arange(16.0) % 4], dim=1)
        given = {
            "hidden_states": torch.randn(BATCH, 16, 4), "encoder_hidden_states": torch.randn(BATCH, 6, 32),
            "timestep": torch.rand(BATCH), "img_ids": ids, "txt_ids": torch.zeros(6, 3),
        }  # fmt: skip
        if not chroma:
            given["pooled_projections"] = torch.randn(BATCH, 16)
        if guidance:
            given["guidance"] = torch.full((BATCH,), 3.5)
        return given

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _sana() -> Foreign:
    model = _kind("SanaTransformer2DModel")(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=32,
        sample_size=8,
    )  # fmt: skip
    return Foreign(
        model=model, inputs=lambda: (torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, 6, 32), _times()), loss_fn=far
    )


def _aura() -> Foreign:
    model = _kind("AuraFlowTransformer2DModel")(
        sample_size=16, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, out_channels=4, pos_embed_max_size=64,
    )  # fmt: skip
    return Foreign(
        model=model,
        inputs=lambda: (torch.randn(BATCH, 4, 16, 16), torch.randn(BATCH, 6, 32), torch.rand(BATCH)),
        loss_fn=far,
    )


def _lumina() -> Foreign:
    model = _kind("Lumina2Transformer2DModel")(
        sample_size=8, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3,
        num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=16,
    )  # fmt: skip

    def inputs() -> Any:
        mask = torch.ones(BATCH, 6, dtype=torch.bool)
        return torch.randn(BATCH, 4, 8, 8), torch.rand(BATCH), torch.randn(BATCH, 6, 16), mask

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _qwen() -> Foreign:
    model = _kind("QwenImageTransformer2DModel")(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": torch.randn(BATCH, 6, 32),
            "encoder_hidden_states_mask": torch.ones(BATCH, 6, dtype=torch.int64), "timestep": torch.rand(BATCH),
            "img_shapes": [(1, 4, 4)] * BATCH,
        }  # fmt: skip

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _wan() -> Foreign:
    model = _kind("WanTransformer3DModel")(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return Foreign(
        model=model, inputs=lambda: (torch.randn(2, 4, 2, 16, 16), _times(2), torch.randn(2, 6, 16)), loss_fn=far
    )


def _cogvideo() -> Foreign:
    model = _kind("CogVideoXTransformer3DModel")(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=16,
        text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8, sample_frames=9, max_text_seq_length=6,
    )  # fmt: skip
    return Foreign(
        model=model, inputs=lambda: (torch.randn(2, 3, 4, 8, 8), torch.randn(2, 6, 16), _times(2)), loss_fn=far
    )


def _ltx() -> Foreign:
    model = _kind("LTXVideoTransformer3DModel")(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=16,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(2, 2 * 4 * 4, 8), "encoder_hidden_states": torch.randn(2, 6, 16),
            "timestep": _times(2), "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool),
            "num_frames": 2, "height": 4, "width": 4,
        }  # fmt: skip

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _latte() -> Foreign:
    model = _kind("LatteTransformer3DModel")(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        patch_size=2, cross_attention_dim=32, caption_channels=16, norm_type="ada_norm_single", attention_bias=True,
        norm_elementwise_affine=False, video_length=2, num_embeds_ada_norm=1000, activation_fn="gelu-approximate",
    )  # fmt: skip
    return Foreign(
        model=model, inputs=lambda: (torch.randn(2, 4, 2, 8, 8), _times(2), torch.randn(2, 6, 16)), loss_fn=far
    )


def _stable_audio() -> Foreign:
    model = _kind("StableAudioDiTModel")(
        sample_size=16, in_channels=8, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        num_key_value_attention_heads=2, out_channels=8, cross_attention_dim=32, time_proj_dim=16,
        global_states_input_dim=16, cross_attention_input_dim=16,
    )  # fmt: skip

    def inputs() -> Any:
        return torch.randn(2, 8, 16), torch.rand(2), torch.randn(2, 6, 16), torch.randn(2, 1, 16), None

    return Foreign(model=model, inputs=inputs, loss_fn=far)


def _autoencoder(name: str, sampled: bool = False, **own: Any) -> Foreign:
    if "block_out_channels" in own:
        own |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = _kind(name)(**own)
    if sampled:
        return Foreign(
            model=model,
            inputs=lambda: {"sample": torch.randn(BATCH, 3, 16, 16), "sample_posterior": True},
            loss_fn=far,
        )
    return Foreign(model=model, inputs=images(3, 16, 16), loss_fn=far)


def _oobleck() -> Foreign:
    model = _kind("AutoencoderOobleck")(
        encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=8,
        decoder_input_channels=4,
    )  # fmt: skip
    return Foreign(model=model, inputs=images(2, 64), loss_fn=far)


def _wan_autoencoder() -> Foreign:
    model = _kind("AutoencoderKLWan")(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )  # fmt: skip
    return Foreign(model=model, inputs=images(3, 5, 16, 16, batch=2), loss_fn=far)


def _temporal(name: str) -> Foreign:
    model = _kind(name)(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4)

    def inputs() -> dict[str, Any]:
        return {"sample": torch.randn(4, 3, 16, 16), "num_frames": 2}

    return Foreign(model=model, inputs=inputs, loss_fn=far)
