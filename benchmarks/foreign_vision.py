"""Models of images: timm (one a module file), torchvision, segmentation-models-pytorch, open-clip."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import BATCH, classified, far, images

Models = dict[str, Callable[[], Foreign]]
SIZE, CLASSES = 64, 10
TIMM = (
    "eca_botnext26ts_256 test_byobnet cait_xxs24_224 coat_tiny convit_tiny test_convnext cpubone_nano csatv2 "
    "cs3darknet_focus_s cspnext_tiny densenet121 dla34 dpn48b edgenext_xx_small efficientformerv2_s0 "
    "test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 "
    "fastvit_t8 gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto "
    "lcnetv2_small lowformer_b0 test_mambaout test_coatnet poolformer_s12 mobilenetv3_small_050 mobilevit_xxs "
    "test_nfnet pit_ti_224 pvt_v2_b0 regnetx_002 repghostnet_050 repvit_m1 resnest14d test_resnet resnetv2_18 "
    "rexnet_100 legacy_seresnet18 shvit_s1 skresnet18 starnet_s050 swiftformer_xs tiny_vit_5m_224 test_vit "
    "visformer_tiny test_vit_relpos ese_vovnet19b_slim_dw xcit_nano_12_p8_224"
)
"""The smallest variant of a module file."""
_TWO = {"depths": (1, 1, 1, 1)}
TIMM_SMALLER: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "deit_tiny_patch16_224": {"depth": 2},
    "deepseek_vit_412m": {"depth": 2, "embed_dim": 64, "num_heads": 4, "img_size": 70},
    "gemma4_vit_167m": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "qwen3_vit_88m": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "naflexvit_base_patch16_gap": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "samvit_base_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 4, "img_size": 224},
    "mixer_s16_224": {"num_blocks": 2, "embed_dim": 64},
    "convmixer_768_32": {"depth": 2, "dim": 64},
    "crossvit_tiny_240": {"img_size": 240},
    "davit_tiny": {**_TWO, "embed_dims": (16, 32, 64, 128), "num_heads": (1, 2, 4, 8)},
    "efficientformer_l1": {"img_size": 224},
    "focalnet_tiny_srf": {**_TWO, "embed_dim": 16},
    "hiera_tiny_224": {"embed_dim": 16, "img_size": 224},
    "sam2_hiera_tiny": {"embed_dim": 16, "img_size": 224},
    "inception_v3": {"img_size": 96},
    "levit_128": {"img_size": 224},
    "mvitv2_tiny": {"embed_dims": 16, **_TWO},
    "nest_tiny": {"embed_dims": (32, 32, 64), "depths": (1, 1, 2), "num_heads": (2, 2, 4)},
    "nextvit_small": {"depths": (1, 1, 2, 1)},
    "rdnet_tiny": {"num_blocks_list": (1, 1, 1, 1, 1, 1, 1), "img_size": 64},
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "hidden_sizes": (4, 8, 8, 8)},
    "swin_tiny_patch4_window7_224": {"depths": (1, 2, 1, 1), "embed_dim": 12, "img_size": 112},
    "swinv2_tiny_window8_256": {"depths": (1, 2, 1, 1), "embed_dim": 12},
    "swinv2_cr_tiny_224": {"depths": (1, 2, 1, 1), "embed_dim": 12, "img_size": 224},
    "tnt_s_legacy_patch16_224": {"depth": 2, "embed_dim": 48},
    "tresnet_m": {"layers": (1, 1, 1, 1), "width_factor": 0.25},
    "twins_svt_small": {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 64, 64), "img_size": 224},
    "vit_tiny_r_s16_p8_224": {"depth": 2},
    "vitamin_small_224": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "volo_d1_224": {"layers": (1, 1, 1, 1), "embed_dims": (32, 64, 64, 64), "num_heads": (2, 4, 4, 4)},
    "res2next50": {"layers": (1, 1, 1, 1)},
    "selecsls42": {},
    "vgg11": {},
    "inception_v4": {"img_size": 96},
    "legacy_xception": {},
    "xception41p": {},
    "mobilenetv5_base": {"img_size": 128},
}
"""What makes a module file's smallest variant smaller, or another size of image that it needs."""


def timm_models() -> Models:
    made: dict[str, dict[str, Any]] = {name: {} for name in TIMM.split()} | TIMM_SMALLER
    return {name: partial(_timm, name, dict(own)) for name, own in made.items()}


def _timm(name: str, own: dict[str, Any]) -> Foreign:
    import timm

    own = {"img_size": SIZE} | own
    try:
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **own)
    except TypeError:  # any size will do
        rest = {key: value for key, value in own.items() if key != "img_size"}
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **rest)
    return Foreign(model=model, inputs=images(3, own["img_size"], own["img_size"]), loss_fn=classified)


TORCHVISION = {
    "alexnet": 64, "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32, "efficientnet_v2_s": 32,
    "googlenet": 64, "inception_v3": 96, "maxvit_t": 0, "mnasnet0_5": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32,
    "regnet_x_400mf": 32, "regnet_y_400mf": 32, "resnet18": 32, "resnet50": 32, "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 64, "swin_t": 32, "swin_v2_t": 64, "vgg11_bn": 32,
}  # fmt: skip
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_resnet50")
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t", "mvit_v2_s")


def torchvision_models() -> Models:
    import torchvision as tv
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    def classifier(name: str, size: int) -> Foreign:
        model = tv.models.get_model(name, weights=None, num_classes=CLASSES)
        return Foreign(model=model, inputs=images(3, size, size), loss_fn=_and_auxiliary)

    def segmenter(name: str) -> Foreign:
        model = tv.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)
        return Foreign(model=model, inputs=images(3, 64, 64), loss_fn=far)

    def video(name: str) -> Foreign:
        model = tv.models.get_model(name, weights=None, num_classes=CLASSES)
        return Foreign(model=model, inputs=images(3, 16 if name in ("s3d", "mvit_v2_s") else 4, 64, 64), loss_fn=far)

    def vit() -> Foreign:
        model = tv.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, dropout=0.1
        )
        return Foreign(model=model, inputs=images(3, 32, 32), loss_fn=classified)

    def maxvit() -> Foreign:
        model = tv.models.MaxVit(
            input_size=(64, 64), stem_channels=16, partition_size=4, block_channels=[16, 32], block_layers=[1, 1],
            head_dim=8, stochastic_depth_prob=0.2,
        )  # fmt: skip
        return Foreign(model=model, inputs=images(3, 64, 64), loss_fn=classified)

    def pyramid() -> Foreign:
        model = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=3)
        return Foreign(model=model, inputs=images(3, 64, 64), loss_fn=far)

    def flow() -> Foreign:
        model = tv.models.optical_flow.raft_small(weights=None)
        return Foreign(
            model=model, inputs=lambda: (torch.rand(2, 3, 128, 128), torch.rand(2, 3, 128, 128), 2), loss_fn=far
        )

    found: Models = {name: partial(classifier, name, size) for name, size in TORCHVISION.items() if size}
    found |= {name: partial(segmenter, name) for name in SEGMENTATION} | {name: partial(video, name) for name in VIDEO}
    found |= {"vit": vit, "maxvit": maxvit, "resnet18_fpn": pyramid, "raft_small": flow}
    found |= {name: partial(_detector, name) for name in ("ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn")}
    return found


def _and_auxiliary(output: Any) -> Tensor:
    return classified(output) if isinstance(output, Tensor) else far(output)


def _detector(name: str) -> Foreign:
    import torchvision as tv

    model = tv.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)

    def inputs() -> Any:
        corner = torch.rand(2, 3, 2) * 30
        boxes = torch.cat([corner, corner + 20 + torch.rand(2, 3, 2) * 10], dim=2)
        targets = [{"boxes": boxes[i], "labels": torch.randint(1, 4, (3,))} for i in range(2)]
        return [torch.rand(3, 64, 64) for _ in range(2)], targets

    return Foreign(model=model, inputs=inputs, loss_fn=lambda output: torch.stack(list(output.values())).sum())


def segmentation_models() -> Models:
    import segmentation_models_pytorch as smp

    names = "DPT DeepLabV3 DeepLabV3Plus FPN Linknet MAnet PAN PSPNet Segformer UPerNet Unet UnetPlusPlus"
    losses = {"Dice": smp.losses.DiceLoss("multiclass"), "Lovasz": smp.losses.LovaszLoss("multiclass")}
    losses |= {"Focal": smp.losses.FocalLoss("multiclass"), "Tversky": smp.losses.TverskyLoss("multiclass")}
    losses |= {"Jaccard": smp.losses.JaccardLoss("multiclass")}

    def decoder(name: str, loss: str = "") -> Foreign:
        encoder = {"DPT": "tu-test_vit", "Unet": "resnet18"}.get(name, "tu-test_resnet")
        model = getattr(smp, name)(encoder_name=encoder, encoder_weights=None, classes=3)
        if not loss:
            return Foreign(model=model, inputs=images(3, 64, 64), loss_fn=far)

        def inputs() -> dict[str, Tensor]:
            return {"x": torch.randn(BATCH, 3, 64, 64), "masks": torch.randint(3, (BATCH, 64, 64))}

        return Foreign(model=model, inputs=inputs, loss_fn=lambda out, batch: losses[loss](out, batch["masks"]))

    found: Models = {name: partial(decoder, name) for name in names.split()}
    return found | {f"Unet, {loss}": partial(decoder, "Unet", loss) for loss in losses}


class _Contrast(nn.Module):
    """A model of images and texts with its loss, as a user's training step would join them."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        out = self.model(image, text)
        result: Tensor = self.loss(*out[:3]) if isinstance(out, tuple) else self.loss(**out)
        return result


def open_clip_models() -> Models:
    from open_clip.loss import ClipLoss, SigLipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

    text = {"context_length": 8, "vocab_size": 96, "width": 32, "heads": 4, "layers": 2}

    def clip(kind: Any, loss: Any, **vision: Any) -> Foreign:
        sizes = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8} | vision
        bias = {"init_logit_bias": -10.0} if loss is SigLipLoss else {}
        model = kind(embed_dim=16, vision_cfg=CLIPVisionCfg(**sizes), text_cfg=CLIPTextCfg(**text), **bias)
        if bias:
            return Foreign(model=_Sigmoid(model, loss()), inputs=inputs)
        return Foreign(model=_Contrast(model, loss()), inputs=inputs)

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.randn(BATCH, 3, 32, 32), torch.randint(1, 96, (BATCH, 8))

    def captioner() -> Foreign:
        from open_clip.coca_model import CoCa, MultimodalCfg

        sizes = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8}
        model = CoCa(
            embed_dim=32,
            multimodal_cfg=MultimodalCfg(context_length=8, vocab_size=96, width=32, heads=4, layers=2),
            text_cfg=CLIPTextCfg(**text, embed_cls=True, output_tokens=True),
            vision_cfg=CLIPVisionCfg(**sizes, attentional_pool=True, attn_pooler_heads=4, output_tokens=True),
        )
        return Foreign(model=model, inputs=inputs, loss_fn=far)

    return {
        "CLIP": partial(clip, CLIP, ClipLoss),
        "CLIP, patch dropout": partial(clip, CLIP, ClipLoss, patch_dropout=0.5),
        "CLIP, resnet": partial(clip, CLIP, ClipLoss, layers=(1, 1, 1, 1), width=8, patch_size=None),
        "CustomTextCLIP": partial(clip, CustomTextCLIP, ClipLoss),
        "SigLIP": partial(clip, CLIP, SigLipLoss),
        "CoCa": captioner,
    }


class _Sigmoid(_Contrast):
    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        images, texts, scale, bias = self.model(image, text)
        result: Tensor = self.loss(images, texts, scale, bias)
        return result
