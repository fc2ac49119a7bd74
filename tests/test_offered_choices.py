"""What the search is offered of an op is what the op's own rule allows, and every option of the strategy table runs:
random graphs of few shapes, with repeated operands, shared weights and views, where ops look alike that are not."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.lower.emit import emit
from autopar.lower.program import make_program
from autopar.rules.registry import rule_of
from autopar.rules.rule import choices
from autopar.search.costs.pricing import make_pricer
from autopar.search.graph.build import build
from autopar.search.known.random_plan import random_plan
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process

BINARY = (torch.mul, torch.add, torch.sub, torch.maximum, lambda a, b: a / (b.square() + 1), lambda a, b: a @ b.T @ a)
UNARY = (torch.tanh, lambda a: 2 * a, lambda a: a.T.contiguous(), lambda a: a.reshape(4, 2, 8).reshape(8, 8), torch.neg)


class Drawn(nn.Module):
    """Calls on tensors of one shape, each of two drawn operands that are often the same; layers are used again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=bool(i)) for i in range(2))
        self.calls = [(rng.randrange(8), rng.random(), rng.random(), rng.random() < 0.4) for _ in range(7)]

    def forward(self, x: Tensor) -> Tensor:
        made = [self.layers[0](x), self.layers[1](x)]
        for kind, first, second, same in self.calls:
            a = made[int(first * len(made))]
            b = a if same else made[int(second * len(made))]
            if kind < 5:
                made.append(BINARY[int(first * 97) % len(BINARY)](a, b))
            elif kind < 7:
                made.append(UNARY[int(second * 97) % len(UNARY)](a))
            else:
                made.append(self.layers[int(second * 2)](a))
        return F.mse_loss(torch.tanh(made[-1]), torch.tanh(made[-2]) * made[0])


def drawn(seed: int) -> tuple[CapturedModel, Drawn, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model, inputs = Drawn(seed).double(), {"x": torch.randn(8, 8, dtype=torch.float64)}
    return capture(model, (), inputs), model, inputs


@pytest.mark.parametrize("seed", range(12))
def test_an_op_is_offered_the_choices_of_its_own_rule(seed: int) -> None:
    for op in make_program(drawn(seed)[0]).ops:
        assert tuple(op.choices.values()) == choices(rule_of(op.node)), op.name


@pytest.mark.parametrize("seed", range(2))
def test_every_option_of_the_strategy_table_is_emitted(seed: int) -> None:
    captured = drawn(seed)[0]
    program, mesh = make_program(captured), make_mesh((2, 2))
    pricer = make_pricer(mesh=mesh, cluster=load_cluster("4xcpu"), config=TrainConfig(precision="fp64"))
    problem, base = build(program, pricer, limit=None, fold=False), random_plan(captured, mesh, random.Random(seed))
    most = max(len(options) for options in problem.options.values())
    for number in range(0, most, 3):  # of every cluster another option in each plan
        own = dict(base.choices)
        for node, options in problem.options.items():
            option = options[(number + node) % len(options)]
            for positions in problem.clusters[node].instances:
                own.update((program.ops[p].name, n) for p, n in zip(positions, option.names, strict=True))
        emit(captured, replace(base, choices=own))


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_of_such_graphs_are_one_process(seed: int) -> None:
    captured, model, inputs = drawn(seed)
    reference = one_process(captured, model, inputs)
    for shape in ((2,), (2, 2)):
        plan = random_plan(captured, make_mesh(shape), random.Random(seed))
        loss, gradient, name = errors_of(reference, plan)
        assert loss <= 1e-10 and gradient <= 1e-8, (seed, shape, name)


def test_a_square_after_a_product_is_no_sum_of_squares() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            return (a * b + b * b).mean()

    product, square, *_ = [op for op in make_program(capture(Net(), (torch.randn(4, 8),), {})).ops if "mul" in op.name]
    assert "partial0" in product.choices and not any(name.startswith("partial") for name in square.choices)
