"""Where in a step does a fault strike? At the n-th event of a phase, in one rank.

What is watched: every op that torch dispatches, collectives and waits for them, replays, messages between stages, and
whatever function a point names. The step before counts the events of each phase, so that `middle` is known.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops import collectives, recompute
from autopar.runtime.pipeline import PipelinedModule
from autopar.runtime.stage import Stage


@dataclass(frozen=True, slots=True)
class Point:
    """The first, middle or last of the events of one kind in one phase."""

    phase: str
    event: str
    which: str = "first"


ENTERED = "entered"
"""The event with which a phase begins."""

SINGLE = {
    "before forward": Point("forward", ENTERED),
    "in the middle of forward": Point("forward", "op", "middle"),
    "between forward and backward": Point("between", ENTERED),
    "in the middle of backward": Point("backward", "op", "middle"),
    "in clipping": Point("clipping", "op", "middle"),
    "before the optimizer": Point("optimizer", ENTERED),
    "in the middle of the optimizer": Point("optimizer", "op", "middle"),
    "at the last op of the optimizer": Point("optimizer", "op", "last"),
    "between steps": Point("data", ENTERED),
    "in the middle of evaluation": Point("evaluation", "op", "middle"),
}
"""Points of a step of any plan without stages."""

BACKWARD_COLLECTIVES = {
    "at the first collective of backward": Point("backward", "collective"),
    "at the middle collective of backward": Point("backward", "collective", "middle"),
    "at the last collective of backward": Point("backward", "collective", "last"),
    "a collective of backward begun": Point("backward", "wait", "middle"),
}
FORWARD_COLLECTIVES = {
    "at the first collective of forward": Point("forward", "collective"),
    "at the middle collective of forward": Point("forward", "collective", "middle"),
    "a collective of forward begun": Point("forward", "wait", "middle"),
}
REPLAYS = {"when backward recomputes": Point("backward", "replay", "middle")}

STAGED = {
    "before the step": Point("forward", ENTERED),
    "in a stage's first pass forward": Point("stage forward", "op"),
    "in the middle of passes forward": Point("stage forward", "op", "middle"),
    "at the first message to another stage": Point("forward", "message"),
    "at the middle message to another stage": Point("forward", "message", "middle"),
    "at the last message to another stage": Point("forward", "message", "last"),
    "a message to another stage begun": Point("forward", "begun message", "middle"),
    "in a stage's first pass back": Point("stage backward", "op"),
    "in the middle of passes back": Point("stage backward", "op", "middle"),
    "at the loss for all stages": Point("forward", "loss"),
    "at the gradients of the step": Point("forward", "gradients"),
    "in clipping": Point("clipping", "op", "middle"),
    "before the optimizer": Point("optimizer", ENTERED),
    "in the middle of the optimizer": Point("optimizer", "op", "middle"),
    "between steps": Point("data", ENTERED),
}
INSIDE_STAGES = {"at the first collective of a stage": Point("stage forward", "collective")}


class Watch(TorchDispatchMode):
    """Counts events by phase, and strikes this rank where it was armed to.

    strike: what happens there.
    """

    def __init__(self, strike: Callable[[], None]) -> None:
        super().__init__()
        self.strike = strike
        self.phase = ""
        self.counts: Counter[tuple[str, str]] = Counter()
        self.before: Counter[tuple[str, str]] = Counter()
        self.target: Point | None = None

    def begin(self, target: Point | None) -> None:
        """Another step (or save) begins, in which `target` is awaited."""
        self.before, self.counts, self.target = self.counts, Counter(), target

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.saw(ENTERED)

    def saw(self, event: str) -> None:
        key = self.phase, event
        self.counts[key] += 1
        if self.target is not None and key == (self.target.phase, self.target.event):
            number = self.before[key]
            wanted = {"first": 1, "middle": (number + 1) // 2, "last": number}[self.target.which]
            if self.counts[key] == max(wanted, 1):
                self.target = None
                self.strike()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.saw("op")
        return func(*args, **(kwargs or {}))

    def watch(self, owner: Any, name: str, event: str, after: str = "") -> None:
        """From now on each call of a function is an event, and its end one named `after`."""
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.saw(event)
            result = function(*args, **kwargs)
            if after:
                self.saw(after)
            return result

        setattr(owner, name, watched)

    def inside(self, owner: Any, name: str, phase: str) -> None:
        """From now on calls of a function are a phase of their own."""
        function = getattr(owner, name)

        def inner(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        setattr(owner, name, inner)

    def watch_all(self) -> None:
        """All that points of a step speak of."""
        send = collectives.send

        def sending(*args: Any, counted: bool = True, **kwargs: Any) -> None:
            self.saw("collective" if counted else "wait")
            send(*args, counted=counted, **kwargs)

        collectives.send = sending
        self.watch(recompute.ReplayedCall, "replay", "replay")
        self.watch(dist, "batch_isend_irecv", "message", "begun message")
        self.inside(Stage, "run", "stage forward")
        self.inside(Stage, "backward", "stage backward")
        self.watch(PipelinedModule, "_everyones_loss", "loss")
        self.watch(PipelinedModule, "_gradients", "gradients")
