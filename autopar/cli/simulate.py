"""`autopar simulate`: how long is a step of an explicit configuration, and what does it hold? A CSV has many."""

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autopar.cli.ending import console_of, print_json
from autopar.cli.parameters import OUTPUT, Json, Trace, option
from autopar.cli.simulate_rows import read_csv, read_row
from autopar.cost_models.efficiency import nominal_efficiency
from autopar.cost_models.gradient_exchange.network import network_of
from autopar.cost_models.gradient_exchange.recommend import ExchangeChoice, recommend
from autopar.cost_models.gradient_exchange.transformer_gradients import transformer_gradients
from autopar.cost_models.links import axis_links
from autopar.cost_models.step_memory import step_memory
from autopar.cost_models.step_time import simulate_step
from autopar.cost_models.step_timeline import step_pipeline
from autopar.cost_models.timeline import simulate as run_timeline
from autopar.cost_models.trace import chrome_trace, write_trace
from autopar.errors import ArgumentError, AutoparError
from autopar.report.exchange_table import exchange_table
from autopar.values.domains import MOST_DEVICES, Domain, checked_number
from autopar.values.whole_file import whole_file

SIMULATED, RANKS, STEP, EXCHANGE = "What is simulated", "Ranks and their work", "The step", "Gradient exchange"
SPARE = Domain(least=0, most=MOST_DEVICES)
MOST_DRAWN = 10**5
"""Passes of a timeline: of twice as many a viewer opens the file no more."""
RESULTS = ("step_seconds", "mfu", "tokens_per_second", "bubble_seconds", "exposed_data_seconds", "allocated_gb", "fits")


def simulate(
    model: Annotated[str | None, typer.Argument(help="a name (llama-3-8b, gpt-175b, ...) or hf:config.json")] = None,
    cluster: Annotated[str | None, option(SIMULATED, help="8xh100, 64x8xa100, or a TOML file")] = None,
    tp: Annotated[int, option(RANKS, help="tensor parallel ranks")] = 1,
    pp: Annotated[int, option(RANKS, help="pipeline stages")] = 1,
    virtual_stages: Annotated[int, option(RANKS, help="of each pipeline rank; above 1 is interleaved")] = 1,
    dp: Annotated[int, option(RANKS, help="data parallel ranks")] = 1,
    zero: Annotated[int, option(RANKS, help="ZeRO stage, 0 to 3")] = 0,
    cp: Annotated[int, option(RANKS, help="context parallel ranks")] = 1,
    ep: Annotated[int, option(RANKS, help="expert parallel ranks, among the data parallel ones")] = 1,
    sequence_parallel: Annotated[bool, option(RANKS, "--sequence-parallel", help="Megatron's, beside tp")] = False,
    micro_batch: Annotated[int, option(RANKS, help="samples of a micro-batch")] = 1,
    global_batch: Annotated[int | None, option(SIMULATED, help="samples a step over all devices")] = None,
    seq: Annotated[int, option(SIMULATED, help="tokens a sample")] = 2048,
    recompute: Annotated[str, option(STEP, help="none, selective, full, op or alternate")] = "none",
    precision: Annotated[str, option(SIMULATED, help="bf16, fp16, fp32, fp8 or fp8-rowwise")] = "bf16",
    attention: Annotated[str, option(STEP, help="flash, flash1, fused or unfused")] = "flash",
    fusion: Annotated[str, option(STEP, help="memory-bound operations in one kernel: none, norm or all")] = "all",
    schedule: Annotated[str, option(RANKS, help="1f1b, gpipe, zb-1p, zb-2p or zbv")] = "1f1b",
    overlap_data: Annotated[bool, option(STEP, "--overlap-data", help="gradients beside backward")] = False,
    overlap_tensor: Annotated[str, option(STEP, help="tensor parallel beside compute: none, backward, all")] = "none",
    network_bandwidth: Annotated[
        float | None, option(SIMULATED, help="measured bytes/s a device, slowest links")
    ] = None,
    exchange: Annotated[bool, option(EXCHANGE, "--exchange", help="compare ways to exchange gradients")] = False,
    spare_machines: Annotated[int, option(EXCHANGE, help="with --exchange: free for parameter servers")] = 0,
    trace: Trace = None,
    csv_file: Annotated[Path | None, option(SIMULATED, "--csv", help="rows of such configurations instead")] = None,
    out: Annotated[Path | None, option(OUTPUT, help="with --csv: write the rows with their results here")] = None,
    as_json: Json = False,
) -> None:
    """Predict step time, MFU, tokens/s and memory of an explicit configuration, or of every row of a CSV."""
    if csv_file is not None:
        if model is not None or cluster is not None:
            raise ArgumentError("--csv names models and clusters in its rows; leave MODEL and --cluster out")
        if exchange or trace is not None:
            raise ArgumentError("--exchange and --trace are for one configuration; leave --csv out")
        _simulate_csv(csv_file, out, as_json)
        return
    if out is not None:
        raise ArgumentError("--out belongs to --csv")
    for name, value in (("MODEL", model), ("--cluster", cluster), ("--global-batch", global_batch)):
        if value is None:
            raise ArgumentError(f"simulate needs {name} (or --csv FILE); autopar simulate --help lists the options")
    checked_number("--spare-machines", spare_machines, SPARE)
    given = {
        "model": model, "cluster": cluster, "tp": tp, "pp": pp, "virtual_stages": virtual_stages, "dp": dp,
        "zero": zero, "cp": cp, "ep": ep, "sequence_parallel": sequence_parallel, "micro_batch": micro_batch,
        "global_batch": global_batch, "seq": seq, "recompute": recompute, "precision": precision,
        "attention": attention, "fusion": fusion, "schedule": schedule, "overlap_data": overlap_data,
        "overlap_tensor": overlap_tensor, "network_bandwidth": network_bandwidth,
    }  # fmt: skip
    row = {key: str(value) for key, value in given.items() if value is not None}
    answer = simulate_row(row, "simulate")
    if trace is not None:
        answer["timeline_seconds"] = _write_trace(row, trace)
    choices = exchange_choices(row, "simulate", spare_machines) if exchange else ()
    if as_json:
        shown = {"exchange": [asdict(choice) for choice in choices]} if exchange else {}
        print_json(answer | shown)
        return
    _print(answer, console := console_of(False))
    if choices:
        console.print(exchange_table(choices))


def simulate_row(row: dict[str, str], where: str) -> dict[str, Any]:
    """Everything that is predicted of one configuration, as plain values.

    Raises:
        AutoparError: if the row asks for what does not fit, its message led by `where`.
    """
    shape, config, cluster = read_row(row, where)
    try:
        efficiency = nominal_efficiency(cluster.device)
        time = simulate_step(shape, config, cluster, efficiency)
        memory = step_memory(shape, config)
    except AutoparError as error:
        raise type(error)(f"{where}: {error}") from error
    reserved = memory.with_reserve("nvidia-smi")
    return {
        "model": shape.name,
        "cluster": cluster.name,
        "rates": efficiency.title,
        "step_seconds": time.seconds,
        "mfu": time.mfu,
        "tokens_per_second": time.tokens_per_second,
        "pipeline_seconds": time.pipeline_seconds,
        "bubble_seconds": time.bubble_seconds,
        "exposed_data_seconds": time.data_seconds,
        "optimizer_seconds": time.optimizer_seconds,
        "allocated_gb": memory.allocated_nbytes / 1e9,
        "with_reserve_gb": reserved / 1e9,
        "device_gb": cluster.device.memory_bytes / 1e9,
        "fits": reserved <= cluster.device.memory_bytes,
        "fullest_stage": memory.stage,
        "memory_gb": {name: nbytes / 1e9 for name, nbytes in memory.kinds},
        "config": asdict(config),
    }


def _write_trace(row: dict[str, str], path: Path) -> float:
    """Seconds of the step on the timeline, which is written to `path`."""
    shape, config, cluster = read_row(row, "simulate")
    if (count := config.num_microbatches * config.pp * config.virtual_stages) > MOST_DRAWN:
        raise ArgumentError(
            f"a step of {count} passes of micro-batches is too long to draw; at most {MOST_DRAWN}: give --trace with a "
            "smaller --global-batch"
        )
    pipeline = step_pipeline(shape, config, cluster, nominal_efficiency(cluster.device))
    timeline = run_timeline(pipeline.tasks)
    write_trace(chrome_trace(pipeline.tasks, timeline, names=pipeline.describe(), streams=pipeline.streams()), path)
    return timeline.makespan


def exchange_choices(row: dict[str, str], where: str, spare_machines: int = 0) -> tuple[ExchangeChoice, ...]:
    """Every exchange system for the gradients of one configuration, fastest first.

    Raises:
        AutoparError: if the row asks for what does not fit, its message led by `where`.
    """
    shape, config, cluster = read_row(row, where)
    try:
        model = transformer_gradients(shape, config, cluster, nominal_efficiency(cluster.device))
        links = axis_links(cluster, config.mesh_shape, (1, 2, 3))  # data and context parallel ranks hold equal weights
        return recommend(model, network_of(cluster, config.tp), spare_machines=spare_machines, links=links)
    except AutoparError as error:
        raise type(error)(f"{where}: {error}") from error


def _simulate_csv(path: Path, out: Path | None, as_json: bool) -> None:
    rows = read_csv(path)
    answers = [simulate_row(row, f"{path}, line {number}") for number, row in enumerate(rows, start=2)]
    if out is not None:
        with whole_file(out) as part, part.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [*rows[0], *(f"predicted_{name}" for name in RESULTS)])
            writer.writeheader()
            for row, answer in zip(rows, answers, strict=True):
                writer.writerow(row | {f"predicted_{name}": answer[name] for name in RESULTS})
    if as_json:
        print_json({"rows": answers})
        return
    console = console_of(False)
    table = Table("line", "model", "cluster", "step s", "MFU", "tokens/s", "bubble s", "allocated GB", "fits")
    for number, answer in enumerate(answers, start=2):
        table.add_row(
            str(number), answer["model"], answer["cluster"], f"{answer['step_seconds']:.4g}", f"{answer['mfu']:.1%}",
            f"{answer['tokens_per_second']:,.0f}", f"{answer['bubble_seconds']:.3g}", f"{answer['allocated_gb']:.1f}",
            "yes" if answer["fits"] else "no",
        )  # fmt: skip
    console.print(table)
    if out is not None:
        console.print(f"written to {out}")


def _print(answer: dict[str, Any], console: Console) -> None:
    console.print(
        f"{answer['model']} on {answer['cluster']}: {answer['step_seconds']:.4g} s a step, MFU {answer['mfu']:.1%}, "
        f"{answer['tokens_per_second']:,.0f} tokens/s",
    )
    console.print(
        f"of which bubbles {answer['bubble_seconds']:.3g} s, gradients not hidden "
        f"{answer['exposed_data_seconds']:.3g} s, optimizer {answer['optimizer_seconds']:.3g} s",
    )
    console.print(f"priced by {answer['rates']}")
    console.print("MFU: attention halved for the causal mask, nothing recomputed, no input embedding, 16-bit peak")
    table = Table("memory, fullest stage", "GB", title_justify="left")
    for name, value in answer["memory_gb"].items():
        table.add_row(name, f"{value:.2f}")
    table.add_section()
    table.add_row("allocated at the peak", f"{answer['allocated_gb']:.2f}")
    table.add_row("with context and allocator's reserve", f"{answer['with_reserve_gb']:.2f}")
    console.print(table)
    verdict = "fits" if answer["fits"] else "does NOT fit"
    console.print(f"stage {answer['fullest_stage']} {verdict} in {answer['device_gb']:.0f} GB")
