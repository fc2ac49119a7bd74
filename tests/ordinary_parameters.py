"""What ordinary code does with parameters, parts and state, as operations of `ordinary_cases`."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.ordinary_cases import WIDTH, Run, batch, net, operation


@operation
def nothing(run: Run) -> None:
    run.step()


@operation
def freeze_a_parameter(run: Run) -> None:
    run.step()
    if (own := run.parameter("a.weight")) is not None:
        own.requires_grad_(False)
    run.step(1)


@operation
def freeze_a_part_and_thaw(run: Run) -> None:
    run.part("a").requires_grad_(False) if run.parameter("a.weight") is not None else None
    run.step()
    run.part("a").requires_grad_(True) if run.parameter("a.weight") is not None else None
    run.step(1)


@operation
def freeze_all_but_one(run: Run) -> None:
    run.model.requires_grad_(False)
    for name in ("a.weight", "b.weight"):
        if (own := run.parameter(name)) is not None:
            own.requires_grad_(True)
    run.step()


@operation
def freeze_all(run: Run) -> None:
    run.model.requires_grad_(False)
    with torch.no_grad():
        run.keep("loss", run.loss())
    for name, own in run.model.named_parameters():
        own.requires_grad_(name != "frozen")


@operation
def thaw_what_was_frozen(run: Run) -> None:
    run.step()
    if (own := run.parameter("frozen")) is not None:
        own.requires_grad = True
    run.step(1)


@operation
def assign_data(run: Run) -> None:
    run.step()
    for own in run.model.parameters():
        own.data = own.data * 0.5
    run.step(1)


@operation
def write_data(run: Run) -> None:
    for own in run.model.parameters():
        own.data.mul_(0.5)
        own.data.copy_(own.data + 0.25)
    run.step(1)


@operation
def write_without_gradients(run: Run) -> None:
    with torch.no_grad():
        for own in run.model.parameters():
            own.mul_(0.5)
            own.copy_(own * 2 + 0.25)
    run.step(1)


@operation
def write_a_whole_tensor(run: Run) -> None:
    with torch.no_grad():
        for own in run.model.parameters():
            own.copy_(torch.linspace(-1, 1, own.numel(), dtype=own.dtype).view(own.shape))
    run.step(1)


@operation
def initialise(run: Run) -> None:
    for name in ("a.weight", "b.weight"):
        if (own := run.parameter(name)) is not None:
            nn.init.constant_(own, 0.125)
    run.step(1)


@operation
def initialise_at_random(run: Run) -> None:
    torch.manual_seed(1)
    for name in ("a.weight", "b.weight"):
        if (own := run.parameter(name)) is not None:
            nn.init.normal_(own)
    run.step(1)


@operation
def write_buffers(run: Run) -> None:
    if "scale" in dict(run.model.named_buffers()):
        run.model.scale.mul_(0.5)
    run.step()
    if "scale" in dict(run.model.named_buffers()):
        run.model.scale = run.model.scale * 3
    run.step()


@operation
def buffer_of_another_shape(run: Run) -> None:
    if "scale" in dict(run.model.named_buffers()):
        run.model.scale = torch.ones(1, dtype=torch.float64)
    run.step()


@operation
def half(run: Run) -> None:
    run.model.half()
    run.backward(x=batch()["x"].half(), y=batch()["y"].half())


@operation
def to_float32(run: Run) -> None:
    run.model.to(torch.float32)
    run.backward(x=batch()["x"].float(), y=batch()["y"].float())


@operation
def to_cpu(run: Run) -> None:
    run.model.to("cpu").double()
    run.step()


@operation
def to_meta(run: Run) -> None:
    run.model.to("meta")
    run.backward()


@operation
def cast_and_back(run: Run) -> None:
    run.model.float()
    run.model.double()
    run.step()


@operation
def replace_a_parameter(run: Run) -> None:
    run.part("a").weight = nn.Parameter(torch.full((2 * WIDTH, WIDTH), 0.125, dtype=torch.float64))
    run.step()


@operation
def remove_a_parameter(run: Run) -> None:
    del run.part("a").weight
    run.step()


@operation
def tie_parameters(run: Run) -> None:
    run.model.norm.bias = run.model.a.bias
    run.step()


@operation
def add_a_parameter(run: Run) -> None:
    run.model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    run.step()


@operation
def replace_a_part(run: Run) -> None:
    run.model.norm = nn.Identity()
    run.step()


@operation
def replace_a_part_by_another(run: Run) -> None:
    run.model.norm = nn.LayerNorm(2 * WIDTH, dtype=torch.float64, eps=0.5)
    run.step()


@operation
def set_an_attribute(run: Run) -> None:
    run.model.norm.eps = 0.5
    run.step()


@operation
def change_forward(run: Run) -> None:
    run.part("norm").forward = lambda x: x * 3
    run.step()


@operation
def parametrize_a_part(run: Run) -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    parametrize.register_parametrization(run.part("a"), "weight", Double())
    run.step()


@operation
def weight_norm(run: Run) -> None:
    parametrizations.weight_norm(run.part("a"))
    run.step()


@operation
def old_weight_norm(run: Run) -> None:
    nn.utils.weight_norm(run.part("a"))
    run.step()


@operation
def spectral_norm(run: Run) -> None:
    nn.utils.spectral_norm(run.part("a"))
    run.step()


@operation
def functional_call(run: Run) -> None:
    values = {name: own.detach() * 2 for name, own in run.model.named_parameters()}
    given = batch()
    args = (given["x"],) if run.kind == "outside" else (given["x"], given["y"])
    with torch.no_grad():
        run.keep("out", torch.func.functional_call(run.model, values, args))


@operation
def vector_of_parameters(run: Run) -> None:
    vector = nn.utils.parameters_to_vector(run.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, run.model.parameters())
    run.step()


@operation
def load_assigning(run: Run) -> None:
    state = {name: value * 0.5 for name, value in net().state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.step()


@operation
def load_own_state(run: Run) -> None:
    run.step()
    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.step(1)
    run.model.load_state_dict(kept)
    run.step(2)


@operation
def load_some(run: Run) -> None:
    run.model.load_state_dict({"a.weight": net().state_dict()["a.weight"] * 0.5}, strict=False)
    run.step()


@operation
def load_into_a_part(run: Run) -> None:
    state = {name: value * 0.5 for name, value in net().a.state_dict().items()}
    if run.parameter("a.weight") is not None:
        run.part("a").load_state_dict(state)
    run.step()


@operation
def iterate_parts(run: Run) -> None:
    run.model.apply(lambda part: [own.data.mul_(0.5) for own in part.parameters(recurse=False)])
    run.step()


@operation
def initialise_by_apply(run: Run) -> None:
    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 0.25)
            part.bias.data.fill_(0.5)

    run.model.apply(init)
    run.step()
