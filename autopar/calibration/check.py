"""How far is a cluster file from the machine? Predicted and measured seconds, measurement by measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.calibration.predict import predicted_collective, predicted_work
from autopar.calibration.reference_steps import predicted_step
from autopar.calibration.samples import Measurements
from autopar.errors import MeshError
from autopar.report.units import nbytes_text
from autopar.values.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One measurement; `subject` is what medians are taken over."""

    subject: str
    what: str
    nbytes: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def check_ranks(cluster: Cluster, num_ranks: int, level_sizes: Sequence[int] | None = None) -> None:
    """Raises MeshError if the file is for another number of ranks, or of hosts and ranks of a host."""
    if cluster.num_devices != num_ranks:
        raise MeshError(
            f"cluster {cluster} has {cluster.num_devices} devices, but {num_ranks} processes were started; start "
            f"{cluster.num_devices}, or calibrate anew"
        )
    own = tuple(level.size for level in cluster.levels if level.size > 1)
    if level_sizes is not None and own != tuple(size for size in level_sizes if size > 1):
        raise MeshError(
            f"cluster {cluster} has levels of {' x '.join(map(str, own)) or '1'}, but processes were started as "
            f"{' x '.join(map(str, level_sizes))} (hosts x ranks of a host); start them as the file says, or calibrate "
            "anew"
        )


def compared(cluster: Cluster, measured: Measurements) -> tuple[CheckRow, ...]:
    """A row a measurement.

    Raises:
        MeshError: if the file is for other ranks than were measured.
        ArgumentError: if it has no peak for a dtype that was measured.
    """
    check_ranks(cluster, measured.origin.num_ranks, measured.origin.level_sizes)
    rows = [
        CheckRow(
            subject=sample.kind,
            what=f"{nbytes_text(sample.nbytes)}, groups of {sample.group_size}{_level_text(sample.level, cluster)}",
            nbytes=sample.nbytes,
            predicted=predicted_collective(cluster, sample),
            measured=sample.seconds,
        )
        for sample in measured.collectives
    ]
    rows += [
        CheckRow(
            subject=sample.subject,
            what=sample.name,
            nbytes=sample.nbytes,
            predicted=predicted_work(cluster, sample),
            measured=sample.seconds,
        )
        for sample in measured.work
    ]
    rows += [
        CheckRow(
            subject="steps",
            what=f"a {sample.size} decoder's, {sample.batch} samples, {sample.kind}",
            nbytes=0,
            predicted=predicted_step(cluster.device, sample.batch, sample.size, sample.kind),
            measured=sample.seconds,
        )
        for sample in measured.steps
    ]
    return tuple(rows)


def median_errors(rows: Sequence[CheckRow]) -> dict[str, float]:
    """Subject -> median of the absolute errors."""
    return {
        subject: float(np.median([abs(row.error) for row in rows if row.subject == subject]))
        for subject in dict.fromkeys(row.subject for row in rows)
    }


def _level_text(level: int | None, cluster: Cluster) -> str:
    if sum(own.size > 1 for own in cluster.levels) == 1:
        return ""
    return ", all ranks" if level is None else f", {[own for own in cluster.levels if own.size > 1][level].name}"
