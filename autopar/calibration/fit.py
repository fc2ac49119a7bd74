"""Which cluster do the measurements describe? Levels with lines for each collective, and a device."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.calibration.fit_device import fit_device
from autopar.calibration.fit_lines import fit_groups, fit_lines
from autopar.calibration.fit_skew import fit_skew
from autopar.calibration.fit_steps import fit_steps
from autopar.calibration.predict import predicted_collective
from autopar.calibration.samples import CollectiveSample, Measurements, Origin
from autopar.report.units import seconds_text
from autopar.values.cluster import Cluster
from autopar.values.link import Line, LinkLevel


def fit_cluster(measured: Measurements, name: str) -> Cluster:
    """The cluster, each figure with its origin and its fit's errors as source.

    Raises:
        ClusterError: if there are not the operations that a device is fitted to.
    """
    origin = measured.origin
    device, _ = fit_device(measured.work, origin)
    if measured.steps:
        device = fit_steps(device, measured.steps, origin)
    sizes = origin.level_sizes
    library = "nccl" if "nccl" in origin.backend else "gloo"
    if origin.num_ranks == 1:
        alone = LinkLevel(
            name="none", size=1, alpha=0.0, bandwidth=1e12, scope="node", sources=(("alpha", "one rank"),)
        )
        return Cluster(name=name, device=device, levels=(alone,), library=library)
    scopes = [_scope(level, origin) for level in range(len(sizes))]
    kinds = list(dict.fromkeys(sample.kind for sample in measured.collectives))
    inside = [[s for s in measured.collectives if s.level == level] for level in range(len(sizes))]
    lines: list[list[Line]] = [[] for _ in sizes]
    for kind in kinds:
        sampled = [
            (size, scope, [s for s in own if s.kind == kind])
            for size, scope, own in zip(sizes, scopes, inside, strict=True)
        ]
        for found, one, general in zip(lines, sampled, fit_lines(kind, sampled, library), strict=True):
            found += [*general, *fit_groups(kind, general, one, library)]
    levels = []
    for level, (size, scope) in enumerate(zip(sizes, scopes, strict=True)):
        # What is not measured (reduce, scatter, gather) is priced with one line through all that is.
        [general] = fit_lines("", [(size, scope, inside[level])], library)
        levels.append(
            LinkLevel(
                name=f"{library}-{scope}",
                size=size,
                alpha=general[-1].alpha,
                bandwidth=general[-1].bandwidth,
                launch=general[-1].launch,
                scope=scope,
                lines=tuple(lines[level]),
                skew=fit_skew([sample for sample in measured.skew if sample.level == level])[0],
            )
        )
    return _with_sources(Cluster(name=name, device=device, levels=tuple(levels), library=library), measured)


def _scope(level: int, origin: Origin) -> str:
    return "network" if level == 0 and len(origin.hosts) > 1 else "node"


def _with_sources(cluster: Cluster, measured: Measurements) -> Cluster:
    """The cluster with the errors of each collective, over all group sizes and levels, in the sources of its lines."""
    levels = []
    for number, level in enumerate(cluster.levels):
        own = [s for s in measured.collectives if s.level == number]
        together = f"{measured.origin}: all collectives together"
        sources = [("alpha", together), ("bandwidth", together)]
        sources += [("launch", together)] if level.launch else []  # what is 0 is not written
        late = [sample for sample in measured.skew if sample.level == number]
        if level.skew:
            error = seconds_text(fit_skew(late)[1])
            sources.append(("skew", f"{measured.origin}: standard error {error} over {len(late)} measurements"))
        for position, line in enumerate(level.lines):
            within = [
                s
                for s in own
                if s.kind == line.kind and line.above <= s.nbytes <= line.up_to and line.members in (0, s.group_size)
            ]
            text = f"{measured.origin}: {_errors_text(cluster, within)}"
            sources += [(f"lines.{position}.{field}", text) for field in ("alpha", "bandwidth", "launch")]
        levels.append(dataclasses.replace(level, sources=tuple(sources)))
    return dataclasses.replace(cluster, levels=tuple(levels))


def _errors_text(cluster: Cluster, samples: Sequence[CollectiveSample]) -> str:
    errors = [abs(predicted_collective(cluster, sample) / sample.seconds - 1) for sample in samples]
    if not errors:
        return "no measurement in this range"
    groups = " and ".join(str(size) for size in sorted({sample.group_size for sample in samples}))
    return (
        f"median error {np.median(errors):.1%}, largest {max(errors):.1%} over {len(errors)} measurements in groups of "
        f"{groups}"
    )
