"""Exchange systems for a simulated step: the seconds and bytes of `autopar simulate`, its `--exchange` answer."""

import json

import pytest

from autopar.cli.main import main
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.efficiency import load_efficiency
from autopar.cost_models.gradient_exchange.all_reduce import LibraryAllReduce
from autopar.cost_models.gradient_exchange.bulk_synchronous import BulkSynchronous
from autopar.cost_models.gradient_exchange.exchange import exchange
from autopar.cost_models.gradient_exchange.network import network_of
from autopar.cost_models.gradient_exchange.recommend import recommend
from autopar.cost_models.gradient_exchange.transformer_gradients import transformer_gradients
from autopar.cost_models.gradient_exchange.wait_free import WaitFree
from autopar.cost_models.links import axis_links
from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.step_time import simulate_step
from autopar.cost_models.training_config import TrainingConfig
from autopar.cost_models.transformer import num_params
from autopar.errors import ArgumentError, MeshError
from autopar.values.cluster import load_cluster

CLUSTER = load_cluster("4x8xh100")
EFFICIENCY = load_efficiency(CLUSTER.device.name)


def config(**changes: object) -> TrainingConfig:
    fields: dict[str, object] = {"tp": 4, "dp": 8, "micro_batch": 1, "global_batch": 16, "seq": 2048}
    return TrainingConfig(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-175b"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tp": 1, "dp": 32, "global_batch": 32}, {"cp": 2, "dp": 4}, {"recompute": "full", "main_grads": False}],
)
def test_seconds_and_bytes_are_those_of_the_simulated_step(name: str, changes: dict[str, object]) -> None:
    shape, asked = named_shape(name), config(**changes)
    model = transformer_gradients(shape, asked, CLUSTER, EFFICIENCY)
    step = simulate_step(shape, asked, CLUSTER, EFFICIENCY)
    assert model.compute_seconds == pytest.approx(step.seconds - step.data_seconds, rel=1e-9)
    size = 4 if asked.main_grads else 2
    assert model.nbytes.sum() == pytest.approx(num_params(shape) * size / asked.tp, rel=1e-3), "norms are left out"
    links = axis_links(CLUSTER, asked.mesh_shape, (1, 2))
    bsp = exchange(model, LibraryAllReduce(links=links), BulkSynchronous())
    assert bsp.exposed_seconds == pytest.approx(collective_seconds("all_reduce", model.nbytes.sum(), links)[0])
    wfbp = exchange(model, LibraryAllReduce(links=links), WaitFree())
    assert model.compute_seconds <= wfbp.seconds


def test_simulate_answers_with_the_same_order(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "simulate llama-3-8b --cluster 4x8xh100 --tp 4 --dp 8 --global-batch 16 --exchange --spare-machines 2"
    with pytest.raises(SystemExit) as exit_:
        main([*arguments.split(), "--json"])
    assert not exit_.value.code
    answer = json.loads(capsys.readouterr().out)["exchange"]
    asked = config()
    model = transformer_gradients(named_shape("llama-3-8b"), asked, CLUSTER, EFFICIENCY)
    links = axis_links(CLUSTER, asked.mesh_shape, (1, 2))
    expected = recommend(model, network_of(CLUSTER, 4), spare_machines=2, links=links)
    assert [row["architecture"] for row in answer] == [choice.architecture for choice in expected]
    assert [row["seconds"] for row in answer] == pytest.approx([choice.seconds for choice in expected])
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert "Exchange of gradients" in capsys.readouterr().out


def test_what_cannot_be_compared() -> None:
    shape = named_shape("llama-3-8b")
    for changes, name in [({"pp": 2, "dp": 4}, "pp is 2"), ({"zero": 3}, "zero is 3")]:
        with pytest.raises(ArgumentError, match=name):
            transformer_gradients(shape, config(**changes), CLUSTER, EFFICIENCY)
    with pytest.raises(MeshError):
        transformer_gradients(shape, config(dp=4), CLUSTER, EFFICIENCY)
    with pytest.raises(ArgumentError, match="replicas of 3 devices do not fit machines of 8"):
        network_of(CLUSTER, 3)
