"""What a plan's step looks like, as a value: its tasks over time, its bytes over time, what each call and tensor costs.

One rank stands for all of its stage. Seconds count from the beginning of the step; bytes are a rank's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.values.explanation import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a track does for some seconds.

    track: number of its track. tasks: how many it joins. action: `F`, `B`, `I` or `W`, the pass of a micro-batch that
    it is of; "" of what runs once a step.
    """

    track: int
    start: float
    seconds: float
    name: str
    action: str = ""
    tasks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A stream of a pipeline rank: its device, or a link with the mesh axes whose collectives it carries."""

    rank: int
    lane: str
    is_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTimeline:
    """A step as it is drawn.

    joined_below: neighbouring tasks that take less than these seconds are one span; 0 where each is its own.
    """

    seconds: float
    tracks: tuple[Track, ...]
    spans: tuple[Span, ...]
    joined_below: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOverTime:
    """Bytes that a pipeline rank holds, by kind, from each of the seconds `at` on, the last until `end`.

    what: what runs then. peak: number of the first moment that has most.
    axis: what the seconds count, in words.
    """

    rank: int
    axis: str
    at: tuple[float, ...]
    end: float
    what: tuple[str, ...]
    kinds: Mapping[str, tuple[float, ...]]
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SentInAStep:
    """`calls` of a collective over mesh axes, and their payload together."""

    rank: int
    kind: str
    over: tuple[str, ...]
    calls: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """All of it.

    ledgers: of each stage, where its seconds go, and what a rank holds at the peak of a micro-batch.
    computed, communicated: of each stage, seconds of a step by op or tensor, everything in turn.
    nbytes: of each stage, by op or tensor, at that peak.
    """

    timeline: DrawnTimeline
    held: tuple[HeldOverTime, ...]
    sent: tuple[SentInAStep, ...]
    ledgers: tuple[Ledger, ...]
    computed: tuple[Mapping[str, float], ...]
    communicated: tuple[Mapping[str, float], ...]
    nbytes: tuple[Mapping[str, float], ...]
