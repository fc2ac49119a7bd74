"""`autopar calibrate`: measure a cluster and write its file, or say how far an existing file is off."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.ending import console_of, print_json
from autopar.cli.parameters import MACHINE, OUTPUT, Json, option

CHECK, MEASURED = "Check a file", "What is measured"


def calibrate(
    out: Annotated[Path | None, option(OUTPUT, help="the cluster file to write, for --cluster of autopar plan")] = None,
    check: Annotated[Path | None, option(CHECK, help="measure briefly and say how far off this file is")] = None,
    tolerance: Annotated[float, option(CHECK, help="with --check: largest median error of a collective")] = 0.25,
    processes: Annotated[
        int | None, option(MACHINE, help="start so many Gloo processes here, without torchrun")
    ] = None,
    name: Annotated[str | None, option(OUTPUT, help="of the cluster; by default the file's")] = None,
    collectives: Annotated[str | None, option(MEASURED, help="all_reduce,all_gather,...; by default all six")] = None,
    dtypes: Annotated[str | None, option(MEASURED, help="of matrix products: fp32,bf16,fp64,fp16")] = None,
    min_bytes: Annotated[int | None, option(MEASURED, help="smallest message")] = None,
    max_bytes: Annotated[int | None, option(MEASURED, help="largest message")] = None,
    sizes: Annotated[int | None, option(MEASURED, help="message sizes between them, log-spaced")] = None,
    rounds: Annotated[int | None, option(MEASURED, help="measurements of everything; the middle half counts")] = None,
    timeout: Annotated[float, option(MACHINE, help="seconds after which a missing rank is an error")] = 600.0,
    as_json: Json = False,
) -> None:
    """Measure links and devices under torchrun (or with --processes 4), and write or check a cluster file."""
    from autopar.calibration.command import CalibrationRequest, is_first_rank, run
    from autopar.calibration.measure import BRIEF, Effort

    given: dict[str, Any] = {
        "kinds": None if collectives is None else tuple(collectives.split(",")),
        "dtypes": None if dtypes is None else tuple(dtypes.split(",")),
        "least_nbytes": min_bytes,
        "most_nbytes": max_bytes,
        "num_sizes": sizes,
        "num_rounds": rounds,
    }
    effort = replace(BRIEF if check else Effort(), **{key: value for key, value in given.items() if value is not None})
    request = CalibrationRequest(
        out=out,
        check=check,
        tolerance=tolerance,
        processes=processes,
        name=name,
        timeout_seconds=timeout,
        effort=effort,
    )
    quiet = as_json or not is_first_rank()
    with redirect_stdout(sys.stderr if quiet else sys.stdout):
        result = run(request, console_of(quiet))
    if as_json and is_first_rank():
        print_json(result)
    if not result["passed"]:
        raise typer.Exit(1)
