"""torchvision without its compiled kernels, which are linked to CUDA and do not load beside torch for CPUs."""

import contextlib
import sys

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_kernels() -> None:
    """Declare what `import torchvision` wants to exist, if it does not; a model that calls one fails in eager mode."""
    with contextlib.suppress(RuntimeError):
        import torchvision  # noqa: F401

        return
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
