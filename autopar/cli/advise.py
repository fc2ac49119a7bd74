"""`autopar advise`: which configuration of a framework is the best one, and how many GPUs?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.ending import console_of, print_json
from autopar.cli.simulate_rows import read_shape
from autopar.errors import ArgumentError
from autopar.values.cluster import load_cluster
from autopar.values.domains import MOST_DEVICES, POSITIVE, Domain, checked_number
from autopar.values.whole_file import write_whole

AMOUNT = Domain(whole=False, least=0, most=1e18, excluded=(0,))
SHOWN = Domain(least=1, most=1000)
GPUS = Domain(least=1, most=MOST_DEVICES)


def advise(
    model: Annotated[str, typer.Argument(help="a name (llama-3-8b, gpt-175b, ...) or hf:config.json")],
    cluster: Annotated[str, typer.Option(help="8xh100, 64x8xa100, or a TOML file")],
    framework: Annotated[
        str, typer.Option("--for", help="torchtitan, accelerate, trainer, megatron, deepspeed, lightning or fsdp")
    ],
    global_batch: Annotated[int, typer.Option(help="samples a step over all devices")],
    seq: Annotated[int, typer.Option(help="tokens a sample")],
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp8 or fp8-rowwise")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd-momentum or sgd")] = "adamw",
    config: Annotated[str | None, typer.Option(help="your own configuration: a file, or words as tp=2,mbs=1")] = None,
    top: Annotated[int, typer.Option(help="configurations of each table")] = 5,
    gpus: Annotated[str | None, typer.Option(help="numbers of GPUs to compare, as 8,16,32")] = None,
    tokens: Annotated[float | None, typer.Option(help="with --gpus: of the whole training, as 300e9")] = None,
    price: Annotated[float | None, typer.Option(help="with --tokens: of a GPU's hour")] = None,
    deadline: Annotated[float | None, typer.Option(help="with --tokens: days; says the fewest GPUs")] = None,
    budget: Annotated[float | None, typer.Option(help="with --price: says the fastest within it")] = None,
    out: Annotated[Path | None, typer.Option(help="write what is to be pasted into this folder")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Rank the configurations that a framework can express, and print the best one ready to paste."""
    from autopar.advice.advise import advise as make_advice
    from autopar.advice.advise import settings_of, sizes
    from autopar.advice.framework import Job
    from autopar.advice.frameworks import framework_named
    from autopar.report.advice_text import advice_text, sizes_table

    chosen = framework_named(framework)
    checked_number("--top", top, SHOWN)
    for name, value in (("--tokens", tokens), ("--price", price), ("--deadline", deadline), ("--budget", budget)):
        if value is not None:
            checked_number(name, value, AMOUNT)
    for name, value in (("--global-batch", global_batch), ("--seq", seq)):
        checked_number(name, value, POSITIVE)
    if tokens is not None and gpus is None:
        raise ArgumentError("--tokens is for --gpus; give the numbers of GPUs, as --gpus 8,16,32")
    for name, value, needed, given in (
        ("--price", price, "--tokens", tokens), ("--deadline", deadline, "--tokens", tokens),
        ("--budget", budget, "--price", price),
    ):  # fmt: skip
        if value is not None and given is None:
            raise ArgumentError(f"{name} needs {needed}")
    job = Job(
        shape=read_shape(model),
        cluster=load_cluster(cluster),
        global_batch=global_batch,
        seq=seq,
        precision=precision,
        optimizer_states=_states(optimizer),
        model_file=model,
    )
    own = None if config is None else chosen.read(*_given(config), job)
    advice = make_advice(chosen, job, own=own, where=f"--config {config}", count=top)
    best = advice.ranking.best[0] if advice.ranking.best else None
    written = () if best is None else chosen.write(job, best.config, best.sharding)
    compared = () if gpus is None else sizes(chosen, job, _counts(gpus), tokens=tokens, price_per_hour=price)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for one in written:
            write_whole(out / one.name.replace(" ", "-").replace("'", ""), one.text.encode())
    if as_json:
        answer: dict[str, Any] = {
            "framework": chosen.title,
            "best": [settings_of(each) for each in advice.ranking.best],
            "does_not_fit": [settings_of(each) for each in advice.ranking.too_large],
            "yours": None if advice.own is None else settings_of(advice.own),
            "without_limits": None if advice.unlimited is None else settings_of(advice.unlimited),
            "written": {one.name: one.text for one in written},
            "gpus": [
                {"gpus": size.num_devices, "days": size.days, "cost": size.cost, "reason": size.reason}
                | ({} if size.best is None else {"best": settings_of(size.best)})
                for size in compared
            ],
        }
        print_json(answer)
        return
    console = console_of(False)
    console.print(advice_text(advice, written), highlight=False)
    if compared:
        console.print(sizes_table(compared, job, "cost"), highlight=False)
        for line in _choice(compared, deadline, budget):
            console.print(line, highlight=False)


def _choice(compared: Any, deadline: float | None, budget: float | None) -> list[str]:
    """Which number meets a deadline with the fewest GPUs, or ends first within a budget."""
    lines = []
    if deadline is not None:
        enough = [size for size in compared if size.days is not None and size.days <= deadline]
        least = min(enough, key=lambda size: size.num_devices, default=None)
        text = "no number of these" if least is None else f"{least.num_devices} GPUs, {least.days:,.1f} days,"
        lines.append(f"in {deadline:g} days: {text} {'is enough' if least is None else 'are the fewest'}")
    if budget is not None:
        paid = [size for size in compared if size.cost is not None and size.cost <= budget]
        first = min(paid, key=lambda size: size.days, default=None)
        text = (
            "no number of these" if first is None else f"{first.num_devices} GPUs end first, in {first.days:,.1f} days"
        )
        lines.append(f"for {budget:,g}: {text}")
    return lines


def _states(optimizer: str) -> int:
    states = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}
    if optimizer not in states:
        raise ArgumentError(f"--optimizer {optimizer} is not one of {', '.join(states)}")
    return states[optimizer]


def _counts(text: str) -> list[int]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise ArgumentError(f"--gpus {text}: {part.strip()!r} is no number of GPUs; write it as 8,16,32")
        checked_number("--gpus", int(part), GPUS)
        counts.append(int(part))
    return counts


def _given(config: str) -> tuple[str, str]:
    """The text of a configuration and its name: of a file, or the words themselves."""
    path = Path(config)
    if not path.is_file():
        if "=" in config and "/" not in config:
            return config, "--config"
        raise ArgumentError(f"--config {config} is no file, nor words as tp=2,mbs=1")
    try:
        return path.read_text(encoding="utf-8"), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config {config} cannot be read: {error}") from error
