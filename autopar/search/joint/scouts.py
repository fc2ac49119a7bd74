"""Among which problems of the joint space is a good first plan expected?"""

from collections.abc import Callable, Sequence

from autopar.search.joint.candidates import Candidate

IDLE = (1.25, 1.05)
"""How much longer than the least work a step may take for what a pipeline idles, to be tried first."""
PLAIN_IDLE = 1.15
"""The same among those of one stage a rank, of which few are in flight, so that their plans are found at once."""


def scouts(keys: Sequence[Candidate], work: Callable[[Candidate], float]) -> list[Candidate]:
    """For each number of stages those on a mesh of fewest axes whose pipeline idles little, or hardly, and runs little
    again, with as few micro-batches as can be. work: seconds a step, at least, with what memory makes run again."""
    out: list[Candidate] = []
    for p in sorted({key.arrangement.pipeline for key in keys}):
        own = [key for key in keys if key.arrangement.pipeline == p]
        axes = min(key.arrangement.mesh.num_axes for key in own)
        seconds = {key: work(key) for key in own if key.arrangement.mesh.num_axes == axes}
        for idle in IDLE:
            near = [key for key in seconds if seconds[key] <= idle * min(seconds.values())]
            out.append(min(near, key=lambda key: (key.microbatches, -key.chunks)))
        plain = {key: value for key, value in seconds.items() if key.chunks == 1}
        near = [key for key, value in plain.items() if value <= PLAIN_IDLE * min(plain.values())]
        out += sorted(near, key=lambda key: key.microbatches)[:1]
    return out
