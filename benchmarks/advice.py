"""`autopar advise` against published runs: `python -m benchmarks.advice --references DIR [--write FILE]`.

Of every source whose software is a framework here (or its ancestor), each group of rows of one model, number of GPUs,
sequence and batch is one question. Asked is: can the framework express what people ran, where does it rank, how far is
its predicted time from the measured one; and of groups with several measured layouts: how much slower than the measured
best is the measured time of the one that is predicted fastest among them and to fit? Habits are those of the software
as it was (`benchmarks.reference_rows`), spaces and prices those of `autopar advise`.
"""

import argparse
import math
import time
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path

from autopar.advice.candidates import layouts, micro_batches
from autopar.advice.framework import Framework, TransformerJob
from autopar.advice.frameworks import FRAMEWORKS
from autopar.advice.rank import RESERVE, rank
from autopar.cost_models.efficiency import load_efficiency
from autopar.cost_models.step_memory import step_memory
from autopar.cost_models.step_time import simulate_step
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import AutoparError
from benchmarks.reference_rows import Case, read_folder

SOURCES = {
    "torchtitan": "torchtitan",
    "Megatron-LM README": "megatron",
    "MegaScale": "megatron",
    "Korthikanti": "megatron",
    "SC'21": "megatron",
    "BLOOM": "megatron",
    "LLaMA layouts": "megatron",
    "Zero-bubble": "megatron",
}
CHOSEN = {
    "tp", "pp", "dp", "cp", "ep", "virtual_stages", "schedule", "zero", "replicate", "keep_gathered", "micro_batch",
    "recompute", "sequence_parallel", "global_batch", "seq", "precision", "optimizer_states",
}  # fmt: skip
RANKED = 100
"""Configurations of a ranking: what is beyond has no place."""
SAME = ("tp", "pp", "dp", "cp", "virtual_stages", "micro_batch", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one group of rows. place: of what people ran among the framework's configurations, by predicted seconds."""

    source: str
    model: str
    gpus: int
    rows: int
    used: Case
    expressible: bool
    place: int
    predicted: float
    best: str
    best_seconds: float
    slower: float | None
    seconds: float


def framework_of(case: Case) -> Framework | None:
    """The framework of a row's software, with the habits of that software."""
    for key, name in SOURCES.items():
        if case.source == key or (key == "torchtitan" and case.source.startswith(key)):
            habits = {f.name: getattr(case.config, f.name) for f in fields(TrainingConfig) if f.name not in CHOSEN}
            found = FRAMEWORKS[name]
            space = replace(found.space, precisions=(*found.space.precisions, case.config.precision))
            return replace(found, habits=habits, space=space)
    return None


def answer(cases: list[Case]) -> Answer | None:
    """What is asked of one group; None where no row has a time or the framework has no configuration."""
    timed = [case for case in cases if case.seconds]
    if not timed or (framework := framework_of(timed[0])) is None:
        return None
    used = min(timed, key=lambda case: case.seconds)
    config, efficiency = used.config, load_efficiency(used.gpu)
    job = TransformerJob(
        shape=used.shape,
        cluster=used.cluster,
        global_batch=config.global_batch,
        seq=config.seq,
        precision=config.precision,
        optimizer_states=config.optimizer_states,
    )
    begun = time.perf_counter()
    try:
        ranking = rank(framework, job, RANKED)
    except AutoparError:
        return None
    seconds = time.perf_counter() - begun
    predicted = simulate_step(used.shape, config, used.cluster, efficiency).seconds
    same = [getattr(config, name) for name in SAME]
    expressible = any(
        [getattr(replace(layout.config, micro_batch=size, recompute=kind), name) for name in SAME] == same
        for layout in layouts(framework, job)
        for size in micro_batches(layout)
        for kind in framework.space.recompute
    )
    best = ranking.best[0] if ranking.best else None
    return Answer(
        source=used.source,
        model=used.shape.name,
        gpus=used.cluster.num_devices,
        rows=len(cases),
        used=used,
        expressible=expressible,
        place=1 + sum(each.seconds < predicted for each in ranking.best),
        predicted=predicted,
        best="nothing fits" if best is None else _degrees(best.config),
        best_seconds=float("nan") if best is None else best.seconds,
        slower=_slower(timed),
        seconds=seconds,
    )


def _slower(timed: list[Case]) -> float | None:
    """Measured time of the layout that is predicted fastest of those predicted to fit, over the measured best's."""
    if len({_degrees(case.config) for case in timed}) < 2:
        return None
    found = []
    for case in timed:
        fits = step_memory(case.shape, case.config).with_reserve(RESERVE) <= case.cluster.device.memory_bytes
        seconds = simulate_step(case.shape, case.config, case.cluster, load_efficiency(case.gpu)).seconds
        found.append((not fits, seconds, case.seconds))
    return min(found)[2] / min(case.seconds or math.inf for case in timed) - 1


def _degrees(c: TrainingConfig) -> str:
    stages = f" v{c.virtual_stages}" if c.virtual_stages > 1 else ""
    context = f" cp{c.cp}" if c.cp > 1 else ""
    return f"tp{c.tp} pp{c.pp}{stages}{context} dp{c.dp} zero{c.zero} mbs{c.micro_batch} {c.recompute}"


def table(answers: list[Answer], command: str) -> str:
    """The page."""
    head = (
        "| source | model | GPUs | rows | people ran | expressible | place | measured s | predicted s | error "
        "| advised | predicted s | advised of the measured | s to answer |"
    )
    lines = [
        "# Advice against published runs",
        "",
        f"Written by `{command}`. Nobody here made these measurements.",
        "",
        "A row is one question: a model, a number of GPUs, a batch. *People ran*: the fastest measured layout. *Place*:"
        " how many of the framework's configurations are predicted faster than that, plus one. *Advised*: the "
        "predicted fastest that fits. *Advised of the measured*: of questions with several measured layouts, the "
        "measured time of the one that is predicted fastest among them, over the fastest measured. What is "
        "advised beyond the measured layouts nobody has timed: its seconds are a prediction.",
        "",
        head,
        "|" + "---|" * 14,
    ]
    for a in answers:
        measured = a.used.seconds
        slower = "–" if a.slower is None else f"{a.slower:+.1%}"
        place = a.place if a.place <= RANKED else f"> {RANKED}"
        lines.append(
            f"| {a.source} | {a.model} | {a.gpus} | {a.rows} | {_degrees(a.used.config)} | "
            f"{'yes' if a.expressible else 'no'} | {place} | {measured:.3g} | {a.predicted:.3g} | "
            f"{a.predicted / measured - 1:+.1%} | {a.best} | {a.best_seconds:.3g} | {slower} | {a.seconds:.1f} |"
        )
    errors = [abs(a.predicted / a.used.seconds - 1) for a in answers]
    slower = [a.slower for a in answers if a.slower is not None]
    lines += [
        "",
        f"{len(answers)} questions: expressible {sum(a.expressible for a in answers)}, mean error "
        f"{sum(errors) / len(errors):.1%}; of {len(slower)} with several measured layouts the advised one is slower by "
        f"{sum(slower) / len(slower):.1%} on the mean, {max(slower):.1%} at most, within 3% in "
        f"{sum(each <= 0.03 for each in slower)}. The slowest answer took {max(a.seconds for a in answers):.1f} s.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Ask every group of the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=Path, required=True, help="folder of CSVs of published measurements")
    parser.add_argument("--write", type=Path, help="write the page here")
    given = parser.parse_args()
    groups: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in read_folder(given.references).cases:
        if framework_of(case) is not None:
            groups[(*case.group, case.stack, case.shape.name)].append(case)
    # Of a source's groups of one model (other kernels, days, numbers of GPUs) the one with the most layouts.
    questions: dict[tuple[object, ...], list[Case]] = {}
    for cases in groups.values():
        first = cases[0]
        sizes = replace(first.shape, name="")
        key = (first.source, sizes)
        questions[key] = max(questions.get(key, []), cases, key=len)
    answers = []
    for cases in questions.values():
        found = answer(cases)
        if found is not None:
            answers.append(found)
            print(found.source, found.model, found.gpus, f"{found.seconds:.1f} s", flush=True)
    page = table(answers, "python -m benchmarks.advice --references DIR --write docs/results/advice.md")
    print(page)
    if given.write is not None:
        given.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
