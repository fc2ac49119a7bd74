"""How does a calibration become a file? The cluster as TOML, under a heading that says where it comes from and how good
it is."""

from pathlib import Path

from autopar.calibration.check import compared, median_errors
from autopar.calibration.samples import Measurements
from autopar.errors import ClusterError
from autopar.values.cluster import Cluster, cluster_toml


def calibration_toml(cluster: Cluster, measured: Measurements) -> str:
    """Text of a cluster file that `load_cluster` reads back as `cluster`."""
    rows = compared(cluster, measured)
    lines = [str(measured.origin), "", "Error of the fit: median, and the largest, of |predicted / measured - 1|"]
    for subject, median in median_errors(rows).items():
        largest = max(abs(row.error) for row in rows if row.subject == subject)
        lines.append(f"    {subject:16} {median:6.1%} {largest:6.1%}")
    lines += ["", "Products, rows x inner x columns: flop/s of one rank while all compute, forward and backward"]
    for sample in measured.work:
        if sample.product:
            lines.append(f"    {sample.dtype} {sample.name:20} {3 * sample.flops / sample.seconds:.3g}")
    for late in measured.skew:
        if late is measured.skew[0]:
            lines += ["", "Seconds that computation and a collective take beyond the two alone"]
        after = f"after {late.compute_seconds * 1e3:.3g} ms"
        lines.append(f"    {late.kind:12} groups of {late.group_size:<4} {after:16} {late.seconds * 1e3:.3g} ms")
    rate = max(3 * sample.nbytes / sample.seconds for sample in measured.work if not sample.flops)
    lines += ["", f"Memory-bound operations: up to {rate:.3g} bytes/s of one rank while all compute"]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + cluster_toml(cluster)


def check_writable(path: Path) -> None:
    """Raises ClusterError, before hours are spent on measuring, unless a file can be written to `path`."""
    if path.suffix != ".toml":
        raise ClusterError(f"--out {path}: a cluster file must end in .toml, or planning will not know it for one")
    if not path.parent.is_dir():
        raise ClusterError(f"--out {path}: there is no folder {path.parent}; make it first")
