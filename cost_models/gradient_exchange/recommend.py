"""Which architecture and which schedule should exchange a model's gradients on a network? All are simulated, in order.

The survey (Shi et al. 2020) leaves open how to choose the architecture (5.2) and the schedule (5.3) for a model and a
network: the answer is the first of the list.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.all_reduce import (
    HierarchicalAllReduce,
    LibraryAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from autopar.cost_models.gradient_exchange.bulk_synchronous import BulkSynchronous
from autopar.cost_models.gradient_exchange.byte_scheduler import ByteScheduler
from autopar.cost_models.gradient_exchange.contract import Architecture, ExchangeSchedule
from autopar.cost_models.gradient_exchange.exchange import exchange
from autopar.cost_models.gradient_exchange.horovod import Horovod
from autopar.cost_models.gradient_exchange.merged_gradients import MergedGradients
from autopar.cost_models.gradient_exchange.model import ExchangeModel
from autopar.cost_models.gradient_exchange.network import Network
from autopar.cost_models.gradient_exchange.parameter_server import ParameterServer
from autopar.cost_models.gradient_exchange.wait_free import WaitFree
from autopar.cost_models.links import Links
from autopar.errors import ArgumentError
from autopar.values.choices import near


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeChoice:
    """A system and its predicted step; `speedup` over one device, all of them counted."""

    architecture: str
    schedule: str
    seconds: float
    exposed_seconds: float
    speedup: float


def architectures(network: Network, spare_machines: int = 0, links: Links | None = None) -> Iterator[Architecture]:
    """Those that apply: servers of their own take `spare_machines`, two levels take two.

    With `links`, all-to-all is what the collective model expects of the library on them.
    """
    if links is not None:
        yield LibraryAllReduce(links=links)
    else:
        yield RingAllReduce(network=network)
        yield TreeAllReduce(network=network)
    if network.nodes > 1:
        if network.devices > 1:
            yield HierarchicalAllReduce(network=network)
        yield ParameterServer(network=network)
        for servers in sorted({1, spare_machines} if spare_machines else ()):
            yield ParameterServer(network=network, servers=servers)


def schedules() -> tuple[ExchangeSchedule, ...]:
    """One of each, with its defaults."""
    return (BulkSynchronous(), WaitFree(), MergedGradients(), Horovod(), ByteScheduler())


def recommend(
    model: ExchangeModel,
    network: Network,
    *,
    spare_machines: int = 0,
    links: Links | None = None,
    only: Iterable[str] = (),
) -> tuple[ExchangeChoice, ...]:
    """Every system that applies, fastest first; with `only`, those whose schedule has one of these names.

    Raises:
        ArgumentError: if `only` names a schedule that does not exist, or `spare_machines` is negative.
    """
    if spare_machines < 0:
        raise ArgumentError(f"{spare_machines} spare machines: give 0 or more")
    known = {schedule.name: schedule for schedule in schedules()}
    wanted = tuple(only) or tuple(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ArgumentError(
            f"exchange schedule {unknown[0]!r} is unknown; choose from {', '.join(known)}{near(unknown[0], known)}"
        )
    choices = []
    for architecture in architectures(network, spare_machines, links):
        for name in wanted:
            step = exchange(model, architecture, known[name])
            choices.append(
                ExchangeChoice(
                    architecture=architecture.name,
                    schedule=name,
                    seconds=step.seconds,
                    exposed_seconds=step.exposed_seconds,
                    speedup=network.ranks * model.compute_seconds / step.seconds,
                )
            )
    # of equals the simplest: sorting keeps the order above
    return tuple(sorted(choices, key=lambda choice: round(choice.seconds, 9)))
