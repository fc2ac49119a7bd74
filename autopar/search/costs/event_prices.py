"""What does an event of a lowered step take? Seconds that it computes, and those of each collective that it sends."""

from functools import cached_property

from autopar.lower.events import Event
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.redistributions import splits_parameters
from autopar.search.costs.pricing import Pricer, Timed


class EventPrices:
    """Prices of the events of one step."""

    def __init__(self, step: LoweredStep, pricer: Pricer) -> None:
        self.step, self.pricer = step, pricer

    @cached_property
    def beside_split(self) -> bool:
        """Whether ranks have a part of some parameter, for which the update of every other takes longer."""
        return splits_parameters(self.step.plan, self.step.redistributed, self.step.target)

    def computed(self, event: Event) -> float:
        """Seconds of an op, or of the optimizer on a parameter; nothing of what is sent."""
        if event.kind == "optimizer":
            one = self.step.redistributed[event.name]
            return self.pricer.optimizer_seconds(one.tensor, one.source, beside_split=self.beside_split)
        if event.op is None or event.inside:
            return 0.0
        names = self.step.plan.choices[event.op.name]
        price = self.pricer.op(event.op, names)
        if event.kind == "recompute":
            return self.pricer.again(event.op, price)
        if event.towards is not None:
            return self.pricer.backward_towards(event.op, names, event.towards)
        return price.forward if event.kind == "forward" else price.backward

    def sent(self, event: Event) -> Timed:
        """Collectives of an event. A bucket's is copied together or apart, too."""
        if event.members:
            seconds = [self.pricer.message(m.kind, m.axes, m.nbytes, True)[0] for m in event.messages]
            seconds[0] += self.pricer.rates.copied_seconds(event.messages[0].nbytes)
            return tuple((m.kind, s, m.axes) for m, s in zip(event.messages, seconds, strict=True))
        if event.step is None:
            return self.pricer.timed(event.messages)
        tensor = self.step.redistributed[event.name].tensor
        share = self.pricer.share(tensor, self.step.plan.lifetimes.get(event.name, ""))
        both = self.pricer.step(event.step, tensor.shape, tensor.element_size, self.is_parameter(event), share)
        return both[event.is_back]

    def is_parameter(self, event: Event) -> bool:
        """Whether a parameter is sent, or the gradient of one."""
        return event.step is not None and self.step.redistributed[event.name].tensor.kind == "parameter"
