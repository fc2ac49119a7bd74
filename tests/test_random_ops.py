"""Every random op of torch: unbound it draws what the model draws, bound what its shard of the whole tensor is."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.errors import ArgumentError, CaptureError
from autopar.lower.emit import emit
from autopar.ops.drawn import drawn
from autopar.ops.dropout import alpha_dropout, dropout, rrelu
from autopar.ops.groups import Groups, use_groups
from autopar.ops.noise import noise
from autopar.ops.random import Draws, use_draws
from autopar.oracle.reference import parameters_of, run_captured
from autopar.runtime.compiled import Compiler
from autopar.runtime.evaluation import evaluation_graph
from autopar.search.known.random_plan import random_plan
from autopar.values.graph import CapturedModel, is_random
from autopar.values.mesh import make_mesh
from tests.noisy import NAMES, noisy
from tests.plans_in_threads import errors_of, one_process

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")  # of a recurrent layer, by torch.export

MESH = make_mesh((2, 2))
PLANS = ((4,), (2, 2), (2,))


@cache
def graph_of(name: str) -> CapturedModel:
    model, inputs = noisy(name)
    return capture(model, (), inputs)


@pytest.mark.parametrize("name", NAMES)
def test_unbound_a_graph_draws_what_the_model_draws(name: str) -> None:
    """Values, gradients, and the state that the default generator is left in."""
    model, inputs = noisy(name)
    captured = graph_of(name)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in parameters_of(captured, model).items()}
    torch.manual_seed(7)
    want = model(**inputs)
    left = torch.get_rng_state()
    torch.manual_seed(7)
    got, _ = run_captured(captured, leaves, {}, inputs)
    assert torch.equal(torch.get_rng_state(), left)
    assert torch.equal(got, want)
    want.backward()
    got.backward()
    for spec in captured.parameters:
        expected, found = model.get_parameter(spec.names[0]).grad, leaves[spec.placeholder].grad
        torch.testing.assert_close(found if found is not None else torch.zeros(()), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_an_exact_plan_draws_what_one_process_draws(name: str) -> None:
    model, inputs = noisy(name)
    captured = graph_of(name)
    reference = one_process(captured, model, inputs)
    rng = random.Random(name)
    for number, shape in enumerate(PLANS):
        plan = random_plan(captured, make_mesh(shape), rng)
        # no gradient comes for the maximum of which gumbel_softmax(hard=True) reads the place alone
        loss_error, gradient_error, parameter = errors_of(reference, plan)
        assert loss_error <= 1e-12, f"plan {number}: loss off by {loss_error}"
        assert gradient_error <= 1e-10, f"plan {number}: gradient of {parameter} off by {gradient_error}"


@pytest.mark.parametrize("name", NAMES)
def test_all_random_calls_are_numbered_in_order(name: str) -> None:
    drawing = [node for node in graph_of(name).graph.nodes if node.op == "call_function" and is_random(node)]
    assert [node.kwargs["site"] for node in drawing] == list(range(len(drawing)))
    assert drawing


def test_what_nothing_reads_is_drawn_by_the_graph_and_not_by_a_plan() -> None:
    captured = graph_of("unread")
    assert [len(node.users) for node in captured.graph.nodes if is_random(node)] == [0, 0, 0, 1]


X = torch.linspace(-2, 2, 64, dtype=torch.float64).view(8, 8)
LIKE = torch.zeros((), dtype=torch.float64)
FILLS = {
    "normal_": (0.0, 1.0),
    "uniform_": (0.0, 1.0),
    "exponential_": (1.0,),
    "geometric_": (0.01,),
    "cauchy_": (0.0, 1.0),
    "log_normal_": (1.0, 2.0),
    "random_": (0, 1000),
}
CALLS = {
    **{
        fill: lambda x, fill=fill, **more: noise(LIKE, fill, *FILLS[fill], size=tuple(x.shape), site=3, **more)
        for fill in FILLS
    },
    "bernoulli_": lambda x, **more: noise(LIKE, "bernoulli_", x.sigmoid(), size=tuple(x.shape), site=3, **more),
    "in another order": lambda x, **more: noise(
        LIKE, "normal_", 0.0, 1.0, size=tuple(x.shape), order=(1, 0), site=3, **more
    ),
    "dropout": lambda x, **more: dropout(x, 0.5, site=3, **more),
    "rows": lambda x, **more: dropout(x, 0.5, along=(0,), site=3, **more),
    "alpha dropout": lambda x, **more: alpha_dropout(x, 0.5, site=3, **more),
    "rrelu": lambda x, **more: rrelu(x, 0.1, 0.9, site=3, **more),
    "poisson": lambda x, **more: drawn("poisson.default", (x + 3) * 100, site=3, **more),
    "gamma": lambda x, **more: drawn("_standard_gamma.default", x + 3, site=3, **more),
    "multinomial": lambda x, **more: drawn("multinomial.default", x + 3, 4, site=3, **more),
    "dirichlet": lambda x, **more: drawn("_sample_dirichlet.default", x + 3, site=3, **more),
}


def shards_of(name: str, draws: Draws) -> list[Tensor]:
    """On each rank of 2 x 2 of which the first axis splits rows."""
    out = []
    for rank in range(4):
        torch.manual_seed(rank)
        with use_groups(Groups(mesh=MESH, rank=rank, groups={})), use_draws(draws):
            out.append(CALLS[name](X.chunk(2)[rank // 2], shape=(8, 8), shards=(("data", 0),)))
    return out


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_replicas_agree_and_shards_differ(name: str, exact: bool) -> None:
    """Whatever a rank's default generator holds."""
    draws = Draws(seed=1, step=2, exact=exact)
    first = shards_of(name, draws)
    assert torch.equal(first[0], first[1]) and torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    if name not in ("rows", "dropout", "alpha dropout", "rrelu"):  # what is dropped of other values differs anyway
        assert all(not torch.equal(a, b) for a, b in zip(first[0], first[2], strict=True))
    for other in (Draws(seed=2, step=2, exact=exact), Draws(seed=1, step=3, exact=exact)):
        assert not torch.equal(torch.cat(first[::2]), torch.cat(shards_of(name, other)[::2]))
    if exact:
        with use_draws(draws):
            torch.testing.assert_close(torch.cat(first[::2]), CALLS[name](X), rtol=0, atol=0)


def test_a_permutation_is_that_of_all_ranks() -> None:
    orders = []
    for rank in range(4):
        with use_groups(Groups(mesh=MESH, rank=rank, groups={})), use_draws(Draws(seed=1, step=0)):
            orders.append(noise(torch.zeros((), dtype=torch.int64), "randperm", size=(9,), site=0))
    assert all(torch.equal(order, orders[0]) for order in orders)
    assert sorted(orders[0].tolist()) == list(range(9))


def test_features_are_dropped_together() -> None:
    with use_draws(Draws(seed=0, step=0)):
        kept = dropout(torch.ones(64, 5, 7), 0.5, along=(0, 1), site=0) != 0
        moved = alpha_dropout(torch.ones(64, 50), 0.5, site=0)
    assert bool((kept == kept[..., :1]).all()) and not bool((kept == kept[:, :1]).all())
    assert moved.unique().numel() == 2


def test_alpha_dropout_keeps_mean_and_deviation() -> None:
    x = torch.nn.functional.selu(torch.randn(200, 500, generator=torch.Generator().manual_seed(1)))
    with use_draws(Draws(seed=0, step=0)):
        out = alpha_dropout(x, 0.3, site=0)
    assert abs(float(out.mean() - x.mean())) < 0.02 and abs(float(out.std() / x.std()) - 1) < 0.02


def test_a_generator_of_its_own_is_refused() -> None:
    graph = fx.Graph()
    from autopar.passes.normalize.random import _rewrite

    node = graph.call_function(torch.ops.aten.rand.generator, ([2],))
    node.meta = {"module": "head"}
    with pytest.raises(CaptureError, match=r"head: aten.rand.generator draws from a torch.Generator of its own"):
        _rewrite(node, {"generator": torch.Generator()})


class Layers(nn.Module):
    """Every layer that drops or draws in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.RReLU())
        self.features = nn.Sequential(nn.Dropout2d(0.4), nn.FeatureAlphaDropout(0.3), nn.Dropout(0.2, inplace=True))
        self.layer = nn.LSTM(4, 4, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(self.features(self.first(x).view(2, 4, 2, 2)).view(2, 4, 4))[0]
        return h.square().mean()


def test_evaluation_drops_nothing() -> None:
    torch.manual_seed(3)
    model, x = Layers().double(), torch.randn(8, 4, dtype=torch.float64)
    captured = capture(model, (x,))
    parts = replace(captured, graph=evaluation_graph(captured.graph))
    loss, _ = run_captured(parts, parameters_of(captured, model), {}, {"arg_0": x})
    torch.testing.assert_close(loss, model.eval()(x), rtol=1e-12, atol=0)


def test_what_draws_inside_a_kernel_is_not_compiled() -> None:
    captured = graph_of("sampled")
    local = emit(captured, random_plan(captured, make_mesh((1,)), random.Random(0)))
    with pytest.raises(ArgumentError, match=r"draws random numbers inside a kernel \(\w+.default\).*eagerly"):
        Compiler(local, "aot_eager", by_block=False, exact_random=False)
