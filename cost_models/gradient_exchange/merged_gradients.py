"""MG-WFBP: neighbouring gradients merged into one message where that saves more start-up time than it waits.

The optimum of all ways to cut the sequence of n gradients into messages, on one link with a line alpha + beta bytes:

    end(0) = 0,   end(j) = min over i < j of  max(end(i), ready(j)) + alpha + beta (s(i+1) + ... + s(j))

Exact, because a message that could start earlier never ends later, and for any seconds(bytes) in place of a line. Where
each message keeps the device from computing for `start` seconds, and for `busy` a byte (a host that copies gradients
into it), the k'th message's gradients are ready k - 1 starts, and the bytes before, later:

    end(k, j) = min over i < j of  max(end(k - 1, i), ready(j) + (k - 1) start + busy s(1..i)) + seconds(s(i+1..j))
    step      = min over k of  max(end(k, n), ready(n) + k start + busy s(1..n))

`merge_with_starts` finds that, trying `MOST` messages at most beside the merge without starts. Its work grows with the
square of n; of very many gradients it cuts only between `PARTS` parts, but anywhere near either end: where the last
message begins is what the step waits for, and where the first ends is when sending begins. `published_merge` is the
authors' own rule, which goes through the gradients once: merge a gradient with the next if that one is ready before the
message would start, or less than alpha after, or if the message is below `least_nbytes`.

Shi, Chu, Li 2019, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", Algorithm 1; the
least size: github.com/HKBU-HPML/ddl-benchmarks, mgwfbp/hv_distributed_optimizer.py, 8,192 elements of 4 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_models.gradient_exchange.contract import Architecture, GradientMessage
from autopar.cost_models.gradient_exchange.model import ExchangeModel

Floats = npt.NDArray[np.float64]
MOST = 64
PARTS, ENDS = 512, 256
"""Gradients between the first and the last `ENDS` are taken in at most so many parts of like bytes."""
Seconds = Callable[[Floats], Floats]
"""Of messages of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedGradients:
    """The optimal merge; or, given `believed` alpha and beta, the authors' rule with those."""

    believed: tuple[float, float] | None = None
    name: str = "mg-wfbp"
    overlaps_forward: bool = False
    credit_nbytes: float = 0.0
    overhead_seconds: float = 0.0

    def messages(self, model: ExchangeModel, architecture: Architecture) -> tuple[GradientMessage, ...]:
        if self.believed is None:
            groups = optimal_merge(model.ready, model.nbytes, *architecture.line())
        else:
            groups = published_merge(model.ready, model.nbytes, *self.believed)
        return tuple(
            GradientMessage(first, last, float(model.nbytes[first : last + 1].sum())) for first, last in groups
        )


def optimal_merge(ready: Floats, nbytes: Floats, alpha: float, beta: float) -> list[tuple[int, int]]:
    """First and last gradient of each message."""
    return _merge(ready, _travel(nbytes, lambda n: alpha + beta * n))


def _travel(nbytes: Floats, seconds: Seconds) -> Floats:
    """Seconds of the message of gradients i + 1 to j, at [j, i]; infinite where there are none."""
    total = np.concatenate([[0.0], np.cumsum(nbytes)])
    sums = total[:, None] - total
    return np.where(np.tri(len(total), k=-1, dtype=bool), seconds(np.maximum(sums, 0.0)), np.inf)


def _merge(ready: Floats, travel: Floats) -> list[tuple[int, int]]:
    count = len(ready)
    end = np.zeros(count + 1)
    cut = np.zeros(count + 1, dtype=np.int64)
    for j in range(1, count + 1):
        ends = np.maximum(end[:j], ready[j - 1]) + travel[j, :j]
        cut[j] = int(np.argmin(ends))
        end[j] = ends[cut[j]]
    groups = []
    j = count
    while j > 0:
        groups.append((int(cut[j]), j - 1))
        j = int(cut[j])
    return groups[::-1]


def merge_with_starts(
    ready: Floats, nbytes: Floats, seconds: Seconds, start: float, busy: float = 0.0
) -> list[tuple[int, int]]:
    """First and last gradient of each message, which keeps the device for `start` seconds too, and `busy` a byte."""
    firsts = _parts(nbytes)
    lasts = np.append(firsts[1:], len(nbytes)) - 1
    groups = _merge_with_starts(ready[lasts], np.add.reduceat(nbytes, firsts), seconds, start, busy)
    return [(int(firsts[first]), int(lasts[last])) for first, last in groups]


def _parts(nbytes: Floats) -> npt.NDArray[np.int64]:
    """First gradient of each part that is not cut: one each, but of very many."""
    count = len(nbytes)
    each = np.arange(count)
    if count <= PARTS + 2 * ENDS:
        return each
    between = slice(ENDS, count - ENDS)
    sent = np.cumsum(nbytes[between])
    part = np.minimum(PARTS * sent / max(sent[-1], 1.0), PARTS - 1).astype(np.int64)
    _, begins = np.unique(part, return_index=True)
    return np.concatenate([each[:ENDS], ENDS + begins, each[count - ENDS :]])


def _merge_with_starts(
    ready: Floats, nbytes: Floats, seconds: Seconds, start: float, busy: float
) -> list[tuple[int, int]]:
    travel = _travel(nbytes, seconds)
    best = _merge(ready, travel)
    if start <= 0:
        return best
    count = len(nbytes)
    least = seconds_with_starts(best, ready, nbytes, seconds, start, busy)
    total = np.concatenate([[0.0], np.cumsum(nbytes)])
    due = np.concatenate([[0.0], ready])
    all_of_it = float(due[-1] + busy * total[-1])
    end = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    cuts: list[npt.NDArray[np.int64]] = []
    for k in range(min(count, MOST)):
        if all_of_it + (k + 1) * start >= least:
            break
        ends = np.maximum(end, (due + k * start)[:, None] + busy * total) + travel
        cuts.append(ends.argmin(axis=1))
        end = ends[np.arange(count + 1), cuts[-1]]
        shown = max(end[-1], all_of_it + (k + 1) * start)
        if shown < least:
            least, best = shown, []
            j = count
            for cut in reversed(cuts):
                best.insert(0, (int(cut[j]), j - 1))
                j = int(cut[j])
    return best


def seconds_with_starts(
    groups: list[tuple[int, int]], ready: Floats, nbytes: Floats, seconds: Seconds, start: float, busy: float = 0.0
) -> float:
    """When the last message has arrived, and the device has started it."""
    end = stalled = 0.0
    for first, last in groups:
        sent = nbytes[first : last + 1].sum()
        end = max(end, float(ready[last]) + stalled) + float(seconds(sent))
        stalled += start + busy * float(sent)
    return max(end, float(ready[-1]) + stalled)


def published_merge(
    ready: Floats, nbytes: Floats, alpha: float, beta: float, least_nbytes: float = 4 * 8192.0
) -> list[tuple[int, int]]:
    """First and last gradient of each message."""
    groups = []
    first, free = 0, 0.0
    for k in range(len(nbytes) - 1):
        merged = float(nbytes[first : k + 1].sum())
        start = max(free, ready[k])
        if ready[k + 1] < start + alpha or merged < least_nbytes:
            continue
        groups.append((first, k))
        first, free = k + 1, start + alpha + beta * merged
    return [*groups, (first, len(nbytes) - 1)]
