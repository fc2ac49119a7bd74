"""What does `autopar calibrate` do? It measures, writes a cluster file or compares one, and prints what it found."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from autopar.calibration.check import CheckRow, check_ranks, compared, median_errors
from autopar.calibration.file import calibration_toml, check_writable
from autopar.calibration.fit import fit_cluster
from autopar.calibration.fit_skew import fit_skew
from autopar.calibration.measure import Effort, measure
from autopar.calibration.processes import on_processes
from autopar.calibration.samples import Measurements
from autopar.errors import ArgumentError, MeshError
from autopar.report.units import nbytes_text, seconds_text
from autopar.runtime.launch import init
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.domains import PROCESSES, TIMEOUT, Domain, checked_number
from autopar.values.link import Line
from autopar.values.whole_file import write_whole

TOLERANCE = Domain(whole=False, least=0, most=1e9, excluded=(0,), instead="0.25 allows a median error of 25%")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What the command line asked for. processes: how many to start here; None under torchrun."""

    out: Path | None = None
    check: Path | None = None
    tolerance: float = 0.25
    processes: int | None = None
    name: str | None = None
    timeout_seconds: float = 600.0
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        if (self.out is None) == (self.check is None):
            raise ArgumentError(
                "calibrate needs --out cluster.toml to write a file, or --check cluster.toml: one of them"
            )
        checked_number("--tolerance", self.tolerance, TOLERANCE)
        checked_number("--timeout", self.timeout_seconds, TIMEOUT)
        if self.processes is not None:
            checked_number("--processes", self.processes, PROCESSES)


def is_first_rank() -> bool:
    """Whether this process speaks for all: it is rank 0, or not one of several."""
    return os.environ.get("RANK", "0") == "0"


def run(request: CalibrationRequest, console: Console) -> dict[str, Any]:
    """Measure, then fit and write, or compare; the result as JSON values, `passed` among them.

    Under torchrun all ranks call this; ranks other than the first get `{"passed": ...}` alone.

    Raises:
        AutoparError: on every rank, for bad input, ranks that differ, and ranks that fail.
    """
    cluster = None if request.check is None else load_cluster(request.check)
    if request.out is not None:
        check_writable(request.out)
    measured = _measured(request, cluster, console)
    if not is_first_rank():
        return {"passed": cluster is None or _passes(compared(cluster, measured), request.tolerance)}
    if cluster is None:
        return _write(request, measured, console)
    return _compare(request, cluster, measured, console)


def _measured(request: CalibrationRequest, cluster: Cluster | None, console: Console) -> Measurements:
    if request.processes is None and "RANK" not in os.environ:
        raise MeshError(
            "there is no process group to measure: start this with torchrun (torchrun --nproc-per-node 4 -m "
            "autopar.cli calibrate ...), or let it start processes of this machine itself (--processes 4)"
        )
    with console.status("") as status:
        if request.processes is not None:
            if cluster is not None:
                check_ranks(cluster, request.processes)
            every: list[Measurements] = on_processes(
                measure,
                request.effort,
                num_processes=request.processes,
                timeout_seconds=request.timeout_seconds,
                tell=status.update,
            )
            return every[0]
        joined = dist.is_initialized()
        init(timeout_seconds=request.timeout_seconds)
        if cluster is not None:
            check_ranks(cluster, dist.get_world_size())
        try:
            return measure(request.effort, status.update if is_first_rank() else lambda _: None)
        finally:
            if not joined:
                dist.destroy_process_group()


def _write(request: CalibrationRequest, measured: Measurements, console: Console) -> dict[str, Any]:
    assert request.out is not None
    cluster = fit_cluster(measured, request.name or request.out.stem)
    write_whole(request.out, calibration_toml(cluster, measured))
    rows = compared(cluster, measured)
    medians = median_errors(rows)
    console.print(str(measured.origin), highlight=False, markup=False)
    for number, level in enumerate(cluster.levels):
        console.print(f"{level.name}, {level.size} members", style="bold", highlight=False)
        if level.size > 1:
            console.print(f"    {_skew_text(number, level.skew, measured)}", highlight=False, markup=False)
        for line in level.lines:
            console.print(
                f"    {line.kind:15} {_groups_text(line):12} {line.protocol:16} launch {seconds_text(line.launch):>8}  "
                f"alpha {seconds_text(line.alpha):>8}  bandwidth {nbytes_text(line.bandwidth)}/s",
                highlight=False,
                markup=False,
            )
    device = cluster.device
    peaks = ", ".join(f"{dtype} {peak * device.efficiency:.3g}" for dtype, peak in device.peak_flops)
    console.print(
        f"{device.name}: flop/s reached {peaks}; memory {nbytes_text(device.memory_bandwidth)}/s; launch "
        f"{seconds_text(device.launch_seconds)}; in a step launches take {device.launch_in_step:.2f} times that, bytes "
        f"{device.bytes_in_step:.2f} and flops {device.flops_in_step:.2f} times, an optimizer's bytes "
        f"{device.optimizer_bytes:.2f} times an operation's; a call run again takes {device.replay_launches:.1f} "
        f"launches beside; attention's flops count {device.attention:.2f} + {device.attention_per_head:.3g} / head + "
        f"{device.attention_per_key:.3g} / keys times",
        highlight=False,
        markup=False,
    )
    console.print(f"median error of the fit: {_errors_text(medians)}", highlight=False, markup=False)
    console.print(f"written to {request.out}; plan with --cluster {request.out}", highlight=False, markup=False)
    return {
        "passed": True,
        "out": str(request.out),
        "origin": str(measured.origin),
        "errors": medians,
        "rows": [_row_json(row) for row in rows],
    }


def _skew_text(number: int, skew: float, measured: Measurements) -> str:
    found, error = fit_skew([sample for sample in measured.skew if sample.level == number])
    at = "" if found == skew else f"; measured {seconds_text(found)}"
    return f"ranks that computed come late by {seconds_text(skew)}{at} (standard error {seconds_text(error)})"


def _groups_text(line: Line) -> str:
    return f"groups of {line.members}" if line.members else "any group"


def _compare(request: CalibrationRequest, cluster: Cluster, measured: Measurements, console: Console) -> dict[str, Any]:
    rows = compared(cluster, measured)
    medians = median_errors(rows)
    console.print(
        f"{'':16} {'':36} {'predicted':>10} {'measured':>10} {'error':>7}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    for row in rows:
        console.print(
            f"{row.subject:16} {row.what:36} {seconds_text(row.predicted):>10} {seconds_text(row.measured):>10} "
            f"{row.error:+7.0%}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for number, level in enumerate(cluster.levels):
        if level.size > 1:
            late = _skew_text(number, level.skew, measured)
            console.print(f"{level.name}: {late}", highlight=False, markup=False)
    passed = _passes(rows, request.tolerance)
    beyond = [subject for subject, error in medians.items() if error > request.tolerance]
    said = "as the file says" if passed else f"NOT as the file says: {', '.join(beyond)}; calibrate anew"
    console.print(f"median error: {_errors_text(medians)}", highlight=False, markup=False)
    console.print(
        f"{cluster} within {request.tolerance:.0%}: {said}",
        style="green" if passed else "red",
        highlight=False,
        markup=False,
    )
    return {
        "passed": passed,
        "file": str(request.check),
        "origin": str(measured.origin),
        "tolerance": request.tolerance,
        "errors": medians,
        "rows": [_row_json(row) for row in rows],
    }


def _passes(rows: tuple[CheckRow, ...], tolerance: float) -> bool:
    return all(error <= tolerance for error in median_errors(rows).values())


def _errors_text(medians: dict[str, float]) -> str:
    return ", ".join(f"{subject} {error:.0%}" for subject, error in medians.items())


def _row_json(row: CheckRow) -> dict[str, Any]:
    return {
        "subject": row.subject,
        "what": row.what,
        "bytes": row.nbytes,
        "predicted_seconds": row.predicted,
        "measured_seconds": row.measured,
        "error": row.error,
    }
