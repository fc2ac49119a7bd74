"""Can every part of a model be reached by its name? One that is named as a method of its class is hidden by it, and
one that torch.jit compiled has no Python."""

import torch
from torch import nn

from autopar.errors import CaptureError


def check_parts(model: nn.Module) -> None:
    """Raises CaptureError if a class attribute hides a part (`self.parameters = nn.ParameterList(...)`), or if one is
    compiled."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or type(model).__name__} is a torch.jit.ScriptModule ({module.original_name}), whose Python no "
                "trace reaches; plan the model with the module that it was scripted or traced from"
            )
        for name, part in module._modules.items():
            if part is not None and getattr(module, name, part) is not part:
                where = f" in {path}" if path else ""
                raise CaptureError(
                    f"{type(module).__name__} has a part {name!r}{where}, which the attribute of its class with that "
                    "name hides, so that no trace reaches it; give the part another name"
                )
