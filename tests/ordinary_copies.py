"""What ordinary code does with copies, inputs and modes, as operations of `ordinary_cases`."""

import copy
import io
import pickle

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.ordinary_cases import ROWS, WIDTH, Run, batch, operation


@operation
def deepcopy(run: Run) -> None:
    run.step()
    average = copy.deepcopy(run.model)
    run.step(1)
    run.model.eval(), average.eval()
    with torch.no_grad():
        for kept, own in zip(average.parameters(), run.model.parameters(), strict=True):
            kept.lerp_(own.detach(), 0.5)
        run.keep("loss", run.loss(2, average))
    run.model.train()


@operation
def deepcopy_of_a_frozen(run: Run) -> None:
    run.model.requires_grad_(False)
    twin = copy.deepcopy(run.model)
    run.keep("trained", torch.tensor([own.requires_grad for own in twin.parameters()]))
    with torch.no_grad():
        run.keep("loss", run.loss(2, twin))
    for name, own in run.model.named_parameters():
        own.requires_grad_(name != "frozen")


@operation
def deepcopy_with_hooks(run: Run) -> None:
    run.model.register_forward_hook(lambda m, args, output: output * 3)
    with torch.no_grad():
        run.keep("loss", run.loss(2, copy.deepcopy(run.model)))


@operation
def averaged(run: Run) -> None:

    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    run.step()
    average.update_parameters(run.model)
    run.step(1)
    average.update_parameters(run.model)
    with torch.no_grad():
        run.keep("loss", run.loss(2, average))


@operation
def pickled(run: Run) -> None:
    twin = pickle.loads(pickle.dumps(run.model))
    with torch.no_grad():
        run.keep("loss", run.loss(2, twin))


@operation
def saved_whole(run: Run) -> None:
    file = io.BytesIO()
    torch.save(run.model, file)


@operation
def integer_inputs(run: Run) -> None:
    run.backward(x=torch.ones(ROWS, WIDTH, dtype=torch.int64))


@operation
def float32_inputs(run: Run) -> None:
    run.backward(x=batch()["x"].float())


@operation
def inputs_of_another_shape(run: Run) -> None:
    run.backward(x=torch.ones(ROWS, WIDTH + 1, dtype=torch.float64))


@operation
def fewer_rows(run: Run) -> None:
    run.keep("loss", run.backward(**batch(0, 6)))


@operation
def inputs_without_values(run: Run) -> None:
    run.backward(x=torch.ones(ROWS, WIDTH, dtype=torch.float64, device="meta"))


@operation
def strided_inputs(run: Run) -> None:
    run.backward(x=batch()["x"].t().contiguous().t())


@operation
def compiled(run: Run) -> None:
    own = torch.compile(run.model, backend="eager")
    with torch.no_grad():
        run.keep("loss", run.loss(0, own))


@operation
def evaluate(run: Run) -> None:
    run.step()
    run.model.eval()
    with torch.inference_mode():
        run.keep("loss", run.loss(1))
    with torch.no_grad():
        run.keep("loss", run.loss(1))
    run.model.train()
    run.step()


@operation
def call_a_part(run: Run) -> None:
    run.keep("h", run.part("a")(batch()["x"]))
