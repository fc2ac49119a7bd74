"""Forty small packages of other kinds: flows, quantizers, diffusion, tables, series, equivariance, losses, likelihoods.

Each model is called as its package's README calls it in training.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, far, images, words

Models = dict[str, Callable[[], Foreign]]
WORDS, SEQ = 96, 16
Entry = tuple[str, dict[str, Any], Any]
_LM = {"num_tokens": WORDS, "dim": 32, "depth": 2, "heads": 4}
_TOKENS, _FEATURES = words(SEQ, WORDS), images(SEQ, 32)
_SQUARE, _VOLUME = images(3, 32, 32), images(1, 16, 16, 16, batch=2)

DIRECT: dict[str, Entry] = {
    "perceiver-pytorch, Perceiver": ("perceiver_pytorch:Perceiver", {
        "num_freq_bands": 2, "depth": 2, "max_freq": 4.0, "num_latents": 8, "latent_dim": 16, "latent_heads": 2,
        "cross_dim_head": 8, "latent_dim_head": 8, "num_classes": 5, "attn_dropout": 0.1,
    }, images(8, 8, 3)),
    "perceiver-pytorch, PerceiverIO": ("perceiver_pytorch:PerceiverIO", {
        "depth": 1, "dim": 32, "queries_dim": 16, "logits_dim": 8, "num_latents": 8, "latent_dim": 16,
        "latent_heads": 2, "cross_dim_head": 8, "latent_dim_head": 8, "seq_dropout_prob": 0.2,
    }, lambda: {"data": torch.randn(BATCH, SEQ, 32), "queries": torch.randn(6, 16)}),
    "performer-pytorch": ("performer_pytorch:PerformerLM", _LM | {
        "max_seq_len": SEQ, "dim_head": 8, "auto_check_redraw": False,
    }, _TOKENS),
    "performer-pytorch, causal": ("performer_pytorch:PerformerLM", _LM | {
        "max_seq_len": SEQ, "dim_head": 8, "causal": True, "reversible": True,
    }, _TOKENS),
    "linformer": ("linformer:LinformerLM", _LM | {"seq_len": SEQ, "k": 4}, _TOKENS),
    "linformer, reversible": ("linformer:LinformerLM", _LM | {"seq_len": SEQ, "k": 4, "reversible": True}, _TOKENS),
    "local-attention": ("local_attention:LocalTransformer", _LM | {
        "max_seq_len": SEQ, "local_attn_window_size": 4, "dim_head": 8,
    }, _TOKENS),
    "nystrom-attention": ("nystrom_attention:Nystromformer", {
        "dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "num_landmarks": 4,
    }, _FEATURES),
    "reformer-pytorch": ("reformer_pytorch:ReformerLM", _LM | {
        "max_seq_len": SEQ, "bucket_size": 4, "n_hashes": 2, "ff_chunks": 2, "causal": True,
    }, _TOKENS),
    "routing-transformer": ("routing_transformer:RoutingTransformerLM", _LM | {
        "max_seq_len": SEQ, "window_size": 4, "dim_head": 8, "causal": True,
    }, _TOKENS),
    "sinkhorn-transformer": ("sinkhorn_transformer:SinkhornTransformerLM", _LM | {
        "max_seq_len": SEQ, "bucket_size": 4,
    }, _TOKENS),
    "g-mlp-pytorch": ("g_mlp_pytorch:gMLP", {
        "num_tokens": WORDS, "dim": 32, "depth": 2, "seq_len": SEQ, "causal": True, "prob_survival": 0.8,
    }, _TOKENS),
    "g-mlp-pytorch, gMLPVision": ("g_mlp_pytorch:gMLPVision", {
        "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2,
    }, _SQUARE),
    "mlp-mixer-pytorch": ("mlp_mixer_pytorch:MLPMixer", {
        "image_size": 32, "channels": 3, "patch_size": 8, "dim": 32, "depth": 2, "num_classes": 5,
    }, _SQUARE),
    "res-mlp-pytorch": ("res_mlp_pytorch:ResMLP", {
        "image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_classes": 5,
    }, _SQUARE),
    "conformer": ("conformer:Conformer", {
        "dim": 32, "depth": 2, "dim_head": 8, "heads": 4, "conv_kernel_size": 5, "conv_dropout": 0.1,
    }, _FEATURES),
    "isab-pytorch": ("isab_pytorch:ISAB", {"dim": 32, "heads": 4, "num_latents": 4}, _FEATURES),
    "lambda-networks": ("lambda_networks:LambdaLayer", {"dim": 16, "dim_k": 8, "r": 5, "heads": 4}, images(16, 8, 8)),
    "halonet-pytorch": ("halonet_pytorch:HaloAttention", {
        "dim": 16, "block_size": 4, "halo_size": 2, "dim_head": 8, "heads": 2,
    }, images(16, 8, 8)),
    "mixture-of-experts": ("mixture_of_experts:MoE", {"dim": 32, "num_experts": 4, "hidden_dim": 32}, _FEATURES),
    "st-moe-pytorch": ("st_moe_pytorch:MoE", {"dim": 32, "num_experts": 4, "gating_top_n": 2}, _FEATURES),
    "soft-moe-pytorch": ("soft_moe_pytorch:SoftMoE", {"dim": 32, "seq_len": SEQ, "num_experts": 4}, _FEATURES),
    "product-key-memory": ("product_key_memory:PKM", {
        "dim": 32, "heads": 2, "num_keys": 8, "topk": 4, "dim_head": 16,
    }, _FEATURES),
    "slot-attention": ("slot_attention:SlotAttention", {"num_slots": 3, "dim": 32}, _FEATURES),
    "siren-pytorch": ("siren_pytorch:SirenNet", {
        "dim_in": 2, "dim_hidden": 16, "dim_out": 3, "num_layers": 3,
    }, images(8, 2)),
    "gateloop-transformer": ("gateloop_transformer:Transformer", _LM | {"dim_head": 8}, _TOKENS),
    "timesformer-pytorch": ("timesformer_pytorch:TimeSformer", {
        "dim": 32, "num_frames": 4, "num_classes": 5, "image_size": 16, "patch_size": 8, "depth": 1, "heads": 2,
        "dim_head": 8, "attn_dropout": 0.1,
    }, images(4, 3, 16, 16)),
    "uformer-pytorch": ("uformer_pytorch:Uformer", {
        "dim": 16, "stages": 2, "num_blocks": 1, "window_size": 4, "dim_head": 8, "heads": 2,
    }, _SQUARE),
    "iTransformer": ("iTransformer:iTransformer", {
        "num_variates": 5, "lookback_len": 16, "depth": 1, "dim": 32, "pred_length": (4, 8), "heads": 2,
        "dim_head": 8, "use_reversible_instance_norm": True,
    }, lambda: {"x": torch.randn(BATCH, 16, 5), "targets": (torch.randn(BATCH, 4, 5), torch.randn(BATCH, 8, 5))}),
    "pytorch-tabnet": ("pytorch_tabnet.tab_network:TabNet", {
        "input_dim": 8, "output_dim": 3, "virtual_batch_size": 2,
        "group_attention_matrix": torch.eye(8),
    }, images(8)),
    "pytorch-tabnet, entmax": ("pytorch_tabnet.tab_network:TabNet", {
        "input_dim": 8, "output_dim": 3, "virtual_batch_size": 4, "mask_type": "entmax",
        "group_attention_matrix": torch.eye(8),
    }, images(8)),
    "rtdl, FTTransformer": ("rtdl_revisiting_models:FTTransformer", {
        "n_cont_features": 5, "cat_cardinalities": [3, 4], "d_out": 2, "n_blocks": 2, "d_block": 32,
        "attention_n_heads": 4, "attention_dropout": 0.1, "ffn_d_hidden_multiplier": 2, "ffn_dropout": 0.1,
        "residual_dropout": 0.1,
    }, lambda: (torch.randn(BATCH, 5), torch.randint(3, (BATCH, 2)))),
    "rtdl, ResNet": ("rtdl_revisiting_models:ResNet", {
        "d_in": 8, "d_out": 2, "n_blocks": 2, "d_block": 16, "d_hidden": 32, "d_hidden_multiplier": None,
        "dropout1": 0.1, "dropout2": 0.1,
    }, images(8)),
    "rtdl, periodic": ("rtdl_num_embeddings:PeriodicEmbeddings", {"n_features": 5, "lite": False}, images(5)),
    "ncps, CfC": ("ncps.torch:CfC", {"input_size": 8, "units": 12}, images(6, 8)),
    "ncps, LTC": ("ncps.torch:LTC", {"input_size": 8, "units": 12, "ode_unfolds": 2}, images(4, 8)),
    "egnn-pytorch": ("egnn_pytorch:EGNN_Network", {
        "num_tokens": 21, "num_positions": 8, "dim": 16, "depth": 2, "num_nearest_neighbors": 3,
        "coor_weights_clamp_value": 2.0,
    }, lambda: (torch.randint(21, (BATCH, 8)), torch.randn(BATCH, 8, 3))),
    "egnn-pytorch, all pairs": ("egnn_pytorch:EGNN", {"dim": 16}, lambda: (
        torch.randn(BATCH, 8, 16), torch.randn(BATCH, 8, 3),
    )),
    "nbeats-pytorch": ("nbeats_pytorch.model:NBeatsNet", {
        "stack_types": ("trend", "seasonality"), "nb_blocks_per_stack": 1, "hidden_layer_units": 16,
        "thetas_dim": (4, 8),
    }, images(10)),
    "neuraloperator, FNO": ("neuralop.models:FNO", {
        "n_modes": (4, 4), "in_channels": 2, "out_channels": 1, "hidden_channels": 8, "n_layers": 2,
    }, images(2, 8, 8)),
    "neuraloperator, TFNO": ("neuralop.models:TFNO", {
        "n_modes": (4, 4), "in_channels": 2, "out_channels": 1, "hidden_channels": 8, "n_layers": 2,
        "factorization": "tucker", "rank": 0.5, "implementation": "factorized",
    }, images(2, 8, 8)),
    "neuraloperator, UNO": ("neuralop.models:UNO", {
        "in_channels": 2, "out_channels": 1, "hidden_channels": 8, "lifting_channels": 8, "projection_channels": 8,
        "n_layers": 3, "uno_out_channels": [8, 8, 8], "uno_n_modes": [[4, 4]] * 3,
        "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], "channel_mlp_skip": "linear",
    }, images(2, 8, 8)),
    **{
        f"vector-quantize-pytorch, {name}": (
            "benchmarks.foreign_stateful:quantized", {"kind": kind, **own}, images(8, 16)
        )
        for name, (kind, own) in {
            "VQ": ("VectorQuantize", {"dim": 16, "codebook_size": 8}),
            "VQ, k-means": ("VectorQuantize", {"dim": 16, "codebook_size": 8, "kmeans_init": True}),
            "VQ, dead codes": ("VectorQuantize", {"dim": 16, "codebook_size": 8, "threshold_ema_dead_code": 2}),
            "VQ, cosine": ("VectorQuantize", {"dim": 16, "codebook_size": 8, "use_cosine_sim": True}),
            "VQ, learned": ("VectorQuantize", {"dim": 16, "codebook_size": 8, "learnable_codebook": True,
                                               "ema_update": False}),
            "VQ, no rotation": ("VectorQuantize", {"dim": 16, "codebook_size": 8, "rotation_trick": False}),
            "RVQ": ("ResidualVQ", {"dim": 16, "codebook_size": 8, "num_quantizers": 2}),
            "RVQ, dropout": ("ResidualVQ", {"dim": 16, "codebook_size": 8, "num_quantizers": 2,
                                            "quantize_dropout": True}),
            "FSQ": ("FSQ", {"dim": 16, "levels": [5, 3, 3]}),
            "LFQ": ("LFQ", {"dim": 16, "codebook_size": 16}),
            "SimVQ": ("SimVQ", {"dim": 16, "codebook_size": 8}),
        }.items()
    },
    **{
        f"monai, {name}": (f"monai.networks.nets:{name}", own, shape)
        for name, (own, shape) in {
            "UNet": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16),
                      "strides": (2, 2), "num_res_units": 1, "dropout": 0.1}, _VOLUME),
            "AttentionUnet": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (4, 8),
                               "strides": (2,)}, _VOLUME),
            "SegResNet": ({"init_filters": 8, "in_channels": 1, "blocks_down": (1, 1), "blocks_up": (1,)}, _VOLUME),
            "VNet": ({"in_channels": 1, "out_channels": 2, "spatial_dims": 2}, images(1, 32, 32)),
            "DynUNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3),
                         "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16),
                         "deep_supervision": True}, images(1, 32, 32)),
            "UNETR": ({"in_channels": 1, "out_channels": 2, "img_size": (16, 16, 16), "feature_size": 4,
                       "hidden_size": 24, "mlp_dim": 32, "num_heads": 2}, _VOLUME),
            "SwinUNETR": ({"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2,
                           "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}, images(1, 64, 64, batch=2)),
            "DenseNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 8,
                          "growth_rate": 4, "block_config": (2, 2), "dropout_prob": 0.1}, images(1, 32, 32)),
            "SENet": ({"spatial_dims": 2, "in_channels": 1, "block": "se_resnet_bottleneck", "layers": (1, 1, 1, 1),
                       "groups": 1, "reduction": 4, "num_classes": 3, "dropout_prob": 0.1}, images(1, 32, 32)),
        }.items()
    },
}  # fmt: skip
"""By package and model: its class (or function), arguments, inputs; the loss pulls every output."""


def models() -> Models:
    found: Models = {name: partial(_direct, *entry) for name, entry in DIRECT.items()}
    from benchmarks.foreign_losses_zoo import models as losses
    from benchmarks.foreign_stateful import models as stateful

    found |= losses() | stateful()
    found |= {f"{name}, called once before": partial(_called, found[name]) for name in FLAGGED}
    return dict(sorted(found.items()))


FLAGGED = (
    "vector-quantize-pytorch, VQ, k-means", "normflows, real-NVP, ActNorm", "normflows, glow", "nflows, ActNorm",
    "x-transformers, alibi_pos_bias", "snntorch, Leaky", "snntorch, Synaptic", "snntorch, Alpha",
)  # fmt: skip
"""Models that start themselves at their first call, which a plan asks for."""


def _called(make: Callable[[], Foreign]) -> Foreign:
    foreign = make()
    given = foreign.inputs()
    with torch.no_grad():
        foreign.model.train()(*(() if isinstance(given, dict) else given), **(given if isinstance(given, dict) else {}))
    return foreign


def _direct(path: str, own: dict[str, Any], inputs: Any) -> Foreign:
    module, name = path.split(":")
    model = getattr(import_module(module), name)(**own)
    return Foreign(model=model, inputs=inputs, loss_fn=far)
