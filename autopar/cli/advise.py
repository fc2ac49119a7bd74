"""`autopar advise`: which configuration of a framework is the best one, and how many GPUs?"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.ending import console_of, one_answer
from autopar.cli.options import overrides
from autopar.cli.parameters import OUTPUT, WHAT, Cluster, Json, Set, option
from autopar.cli.progress import ProgressLine
from autopar.cli.simulate_rows import has_shape, read_shape
from autopar.cost_models.transformer import READERS
from autopar.errors import ArgumentError
from autopar.values.cluster import load_cluster
from autopar.values.domains import MOST_DEVICES, POSITIVE, Domain, checked_number
from autopar.values.train_config import NUM_STATES
from autopar.values.whole_file import write_whole

if TYPE_CHECKING:  # the command line is there before torch is
    from autopar.advice.framework import ConfigFile, Framework, TransformerJob
    from autopar.advice.planned import ModelJob

COMPARE = "What it is compared with"
KINDS = tuple(READERS)
AMOUNT = Domain(whole=False, least=0, most=1e18, excluded=(0,))
SHOWN = Domain(least=1, most=1000)
GPUS = Domain(least=1, most=MOST_DEVICES)
NEEDS = {
    "--tokens": ("--gpus",),
    "--price": ("--gpus", "--tokens"),
    "--deadline": ("--gpus", "--tokens"),
    "--budget": ("--gpus", "--tokens", "--price"),
}
UNREAD = 20
"""Keys of a user's file that are named, of those that no price knows."""


def advise(
    model: Annotated[
        str,
        typer.Argument(help="a name (llama-3-8b, gpt-175b, ...), hf:config.json, file.py:function or module:function"),
    ],
    cluster: Cluster,
    framework: Annotated[
        str, option(WHAT, "--for", help="torchtitan, accelerate, trainer, megatron, deepspeed, lightning or fsdp")
    ],
    global_batch: Annotated[int, option(WHAT, help="samples a step over all devices")],
    seq: Annotated[int | None, option(WHAT, help="tokens a sample; needed for a transformer by its name")] = None,
    precision: Annotated[
        str, option(WHAT, help="bf16, fp16, fp32, or fp8 for megatron; plan calls the first bf16-mixed")
    ] = "bf16",
    optimizer: Annotated[str, option(WHAT, help="adamw, adam, sgd-momentum or sgd")] = "adamw",
    set_: Set = None,
    config: Annotated[
        str | None, option(COMPARE, help="your own configuration: a file, or words as tp=2,mbs=1")
    ] = None,
    plan: Annotated[
        Path | None, option(COMPARE, help="a plan.json of the same model, batch and devices: what autopar would do")
    ] = None,
    gpus: Annotated[str | None, option(COMPARE, help="numbers of GPUs to compare, as 8,16,32")] = None,
    tokens: Annotated[float | None, option(COMPARE, help="with --gpus: of the whole training, as 300e9")] = None,
    price: Annotated[float | None, option(COMPARE, help="with --tokens: of a GPU's hour")] = None,
    deadline: Annotated[float | None, option(COMPARE, help="with --tokens: days; says the fewest GPUs")] = None,
    budget: Annotated[float | None, option(COMPARE, help="with --price: says the fastest within it")] = None,
    top: Annotated[int, option(OUTPUT, help="configurations of each table")] = 5,
    out: Annotated[Path | None, option(OUTPUT, help="write what is to be pasted into this folder")] = None,
    as_json: Json = False,
) -> None:
    """Rank the configurations that a framework can express, and print the best one ready to paste."""
    from autopar.advice.advise import size_values, sizes
    from autopar.advice.framework import TransformerJob
    from autopar.advice.frameworks import framework_named
    from autopar.advice.planned import ModelJob
    from autopar.report.advice_text import paste, sizes_table
    from autopar.values.plan_file import load_saved

    chosen = framework_named(framework)
    checked_number("--top", top, SHOWN)
    amounts = {"--tokens": tokens, "--price": price, "--deadline": deadline, "--budget": budget}
    for name, value in amounts.items():
        if value is not None:
            checked_number(name, value, AMOUNT)
    for name, value in (("--global-batch", global_batch), ("--seq", seq)):
        if value is not None:
            checked_number(name, value, POSITIVE)
    given = {name for name, value in {**amounts, "--gpus": gpus}.items() if value is not None}
    for name, needed in NEEDS.items():
        if name in given and (missing := [other for other in needed if other not in given]):
            raise ArgumentError(f"{name} needs {' and '.join(missing)}")
    if optimizer not in NUM_STATES:
        raise ArgumentError(f"--optimizer {optimizer} is not one of {', '.join(NUM_STATES)}")
    machine = load_cluster(cluster)
    saved = None if plan is None else load_saved(plan)
    planned = None if saved is None else saved.plan
    if planned is not None and planned.world != machine.num_devices:
        raise ArgumentError(f"--plan {plan} is for {planned.world} devices, {machine} has {machine.num_devices}")
    call = None if saved is None else saved.call
    if call is not None and call.batch() not in (None, global_batch):
        raise ArgumentError(f"--plan {plan} is for a batch of {call.batch()}, --global-batch is {global_batch}")
    console = console_of(as_json)
    with one_answer(as_json) as answer, ProgressLine(console) as tell:
        if not has_shape(model):
            if gpus is not None:
                raise ArgumentError(f"--gpus is for transformers with formulas: {', '.join(KINDS)}, or a name")
            if precision not in ("bf16", "fp32"):
                raise ArgumentError(f"--precision {precision} is for transformers with formulas; give bf16 or fp32")
            asked = ModelJob(cluster=machine, global_batch=global_batch, precision=precision, optimizer=optimizer)
            source = {"spec": model, "seq": seq, "overrides": overrides(set_)}
            shown, written = _own_model(chosen, source, asked, config, top, answer, tell)
        else:
            if set_:
                raise ArgumentError("--set is for models that are built; change the config.json instead")
            if seq is None:
                raise ArgumentError(f"{model} needs --seq, tokens a sample")
            tell("pricing configurations")
            job = TransformerJob(
                shape=read_shape(model),
                cluster=machine,
                global_batch=global_batch,
                seq=seq,
                precision=precision,
                optimizer_states=NUM_STATES[optimizer],
            )
            shown, written = _transformer(chosen, job, config, top, answer)
            if gpus is not None:
                tell("pricing numbers of GPUs")
                compared = sizes(chosen, job, _counts(gpus), tokens=tokens, price_per_hour=price)
                answer["gpus"] = [size_values(size) for size in compared]
                shown += [sizes_table(compared, "cost"), *_choice(compared, deadline, budget)]
        answer["written"] = {one.name: one.text for one in written}
        _write(written, out)
        if planned is not None:
            estimate = planned.estimate
            answer["plan"] = {"step_seconds": estimate.step_seconds, "gap": estimate.gap}
            shown.append(
                f"autopar's plan {plan} of {planned.model}: {estimate.step_seconds:.4g} s a step, within "
                f"{estimate.gap:.1%} of the best in the space searched, {estimate.peak_nbytes / 1e9:.1f} GB; "
                "priced op by op"
            )
    for part in [*shown, *paste(written)] if not as_json else ():
        console.print(part, highlight=False)


def _transformer(
    chosen: "Framework", job: "TransformerJob", config: str | None, top: int, answer: dict[str, Any]
) -> "tuple[list[Any], Sequence[ConfigFile]]":
    """What is printed of a model with formulas, and what to paste; `answer` gets the same as plain values."""
    from autopar.advice.advise import advise as make_advice
    from autopar.advice.advise import read_own, settings_of
    from autopar.report.advice_text import advice_text

    own, unread = (None, ()) if config is None else read_own(chosen, *_given(config), job.site)
    advice = make_advice(chosen, job, own=own, where=f"--config {config}", count=top)
    best = advice.ranking.best[0] if advice.ranking.best else None
    answer.update(
        framework=chosen.title,
        best=[settings_of(each) for each in advice.ranking.best],
        does_not_fit=[settings_of(each) for each in advice.ranking.too_large],
        yours=None if advice.own is None else settings_of(advice.own),
        without_limits=None if advice.unlimited is None else settings_of(advice.unlimited),
        unread=list(unread),
    )
    written = () if best is None else chosen.write(job.site, best.config, best.sharding)
    return [*_unread(unread, config), advice_text(advice)], written


def _own_model(
    chosen: "Framework",
    source: dict[str, Any],
    job: "ModelJob",
    config: str | None,
    top: int,
    answer: dict[str, Any],
    tell: Callable[[str], None],
) -> "tuple[list[Any], Sequence[ConfigFile]]":
    """The same of any other model, whose configurations are planned."""
    from autopar.advice.advise import read_own
    from autopar.advice.framework import Site
    from autopar.api.advised import advise_model
    from autopar.models import load_model
    from autopar.report.model_advice_text import model_advice_text, planned_values

    site = Site(cluster=job.cluster, model=source["spec"])
    own, unread = (None, ()) if config is None else read_own(chosen, *_given(config), site)
    tell("building the model")
    loaded = load_model(**source, batch=job.global_batch, precision=job.storage)
    advice = advise_model(chosen, loaded.model, loaded.kwargs or loaded.args, job=job, own=own, progress=tell)
    answer.update(
        framework=chosen.title,
        best=[planned_values(each) for each in advice.best[:top]],
        does_not_fit=[planned_values(each) for each in advice.too_large[:top]],
        yours=None if advice.own is None else planned_values(advice.own),
        left_out=list(advice.left_out),
        unread=list(unread),
    )
    best = advice.best[0] if advice.best else None
    written = () if best is None else chosen.write(advice.site, best.config, best.sharding)
    return [*_unread(unread, config), model_advice_text(advice, written, top)], written


def _unread(unread: Sequence[str], config: str | None) -> list[str]:
    if not unread:
        return []
    more = "" if len(unread) <= UNREAD else f" and {len(unread) - UNREAD} more"
    return [f"not modelled here, whatever it changes: {', '.join(unread[:UNREAD])}{more} of {config}"]


def _write(written: "Sequence[ConfigFile]", out: Path | None) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for one in written:
        write_whole(out / one.name, one.text.encode())


def _choice(compared: Any, deadline: float | None, budget: float | None) -> list[str]:
    """Which number meets a deadline with the fewest GPUs, or ends first within a budget."""
    lines = []
    if deadline is not None:
        enough = [size for size in compared if size.days is not None and size.days <= deadline]
        least = min(enough, key=lambda size: size.num_devices, default=None)
        text = "no number of these" if least is None else f"{least.num_devices} GPUs, {least.days:,.1f} days,"
        lines.append(f"in {deadline:g} days: {text} {'is enough' if least is None else 'are the fewest of these'}")
    if budget is not None:
        paid = [size for size in compared if size.cost is not None and size.cost <= budget]
        first = min(paid, key=lambda size: size.days, default=None)
        text = (
            "no number of these"
            if first is None
            else f"of these {first.num_devices} GPUs end first, in {first.days:,.1f} days"
        )
        lines.append(f"for {budget:,g}: {text}")
    return lines


def _counts(text: str) -> list[int]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise ArgumentError(f"--gpus {text}: {part.strip()!r} is no number of GPUs; write it as 8,16,32")
        checked_number("--gpus", int(part), GPUS)
        counts.append(int(part))
    return counts


def _given(config: str) -> tuple[str, str]:
    """The text of a configuration and the name of its file, "" for words."""
    path = Path(config)
    if not path.is_file():
        if "=" in config and "/" not in config:
            return config, ""
        what = "a folder; give the file in it" if path.is_dir() else "no file, nor words as tp=2,mbs=1"
        raise ArgumentError(f"--config {config} is {what}")
    try:
        return path.read_text(encoding="utf-8"), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config {config} cannot be read: {error}") from error
