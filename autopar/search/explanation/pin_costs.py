"""What does each pin cost? The best plan without it, in the space of all of them: blocks are told apart as with it.

So a plan with the pin is one of those without: what it costs is never below zero, up to the gap that is proved.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from autopar.search.costs.pricing import make_pricer
from autopar.search.explanation.alternatives import Question, Space
from autopar.search.graph.options import EVERYTHING
from autopar.values.pins import DEMAND, FORBID, PIPELINE, LiftedPins, Pins
from autopar.values.train_config import TrainConfig

EVERY_PIN = "all pins together"


def lifted_pins(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Each pin in words, with the configuration in which it does not hold; last that without any. What is said of a
    pipeline is no part of what one arrangement of stages can be asked."""
    texts, other = config.pins.texts, (f"{FORBID}: {PIPELINE}", f"{DEMAND}: {PIPELINE}")
    own = [number for number, text in enumerate(texts) if text not in other]
    for number in own:
        yield texts[number], _without(config, (number,))
    if len(own) > 1:
        yield EVERY_PIN, _without(config, tuple(own))


def _without(config: TrainConfig, numbers: tuple[int, ...]) -> TrainConfig:
    said = {f.name: getattr(config.pins, f.name) for f in fields(Pins)}
    return replace(config, pins=LiftedPins(**said, lifted=numbers))


def pin_questions(space: Space) -> Iterator[Question]:
    """The best plan without each pin, on the plan's own mesh with its micro-batches and limit."""
    pricer = space.pricer
    for text, config in lifted_pins(pricer.config):
        own = make_pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=config, in_buckets=pricer.in_buckets)
        yield replace(space, pricer=own).restricted(text, EVERYTHING)
