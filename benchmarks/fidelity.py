"""How far are predictions from published measurements? Error tables by source.

    python benchmarks/fidelity.py [--references DIR] [--json] [--check]   tables of step time, layouts, OOM, memory
    python benchmarks/fidelity.py --fit                                   fit the constants that the package ships

With --check exit code 1 if a line that should hold does not; it is named last, in any case.

Step time is predicted by leave-one-source-out: the constants of a GPU type are fitted on every other source. A source
that the package's constants were not fitted on is predicted with those. The second column lets one multiplier a
software stack correct it (the median of its own rows). Layout choice: in every group of layouts of one task, the
measured time of the layout predicted fastest, of those predicted to fit, over that of the fastest.

Repeats (`benchmarks.repeats`): how far a source is from itself, below which no error of a model can stay.

A folder with `ddl_survey.csv` or `nccl.csv` has the table of `benchmarks.survey` or `benchmarks.collectives_fidelity`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.cost_models.efficiency import RANGES, Efficiency, load_efficiency
from autopar.cost_models.step_memory import step_memory
from autopar.cost_models.step_work import StepWork
from benchmarks import collectives_fidelity, survey
from benchmarks.fidelity_fit import MEASURED, NUM_SMS, STARTS, TYPES, case_work, fit, predicted_seconds
from benchmarks.layer_rows import layer_cases
from benchmarks.reference_rows import Case, groups, read_folder
from benchmarks.repeats import repeat_rows

# GPUs without measured steps to fit: the type whose parts of nominal rates they take, and their multiprocessors
BORROWED = {"v100": ("a100", 80), "rtx2080ti": ("a100", 68), "b200": ("h100", 148)}
SEARCHES = ("BLOOM", "LLaMA layouts")  # sources that looked for the fastest layout
SURVEY, COLLECTIVES = "ddl_survey.csv", "nccl.csv"
ROOT = Path(__file__).resolve().parents[1]
GIB_A_GB = 2**30 / 1e9  # an "80 GB" card has 80 GiB; the hardware files read the figure as 10^9
FITTED = "least squares on log step time of "
LIMITS = {"a100": (0.08, 0.05), "h100": (0.15, 0.08)}
MEAN_REGRET, MAX_REGRET, OOM_RIGHT, MEMORY_ERROR = 1.03, 1.15, 0.95, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A step that was measured: seconds predicted by constants that saw its source not."""

    case: Case
    predicted: float

    @property
    def log_error(self) -> float:
        assert self.case.seconds is not None
        return log(self.predicted / self.case.seconds)


def main() -> None:
    """Print the tables, as text or as one JSON object, and what of it does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=Path, default=ROOT.parent / "shared" / "references")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a line that should hold does not")
    parser.add_argument("--fit", action="store_true", help="write cost_models/rates/*.toml")
    arguments = parser.parse_args()
    if not arguments.references.is_dir():
        sys.exit(f"fidelity: there is no folder {arguments.references}; name it with --references")
    reading = read_folder(arguments.references)
    if arguments.fit:
        fit_all(arguments.references, reading.cases)
        return
    scored, constants = leave_one_out(arguments.references, reading.cases)
    report: dict[str, Any] = {
        "step_time": step_time_rows(scored),
        "layouts": layout_rows(scored),
        "memory": memory_rows(reading.cases),
        "oom": oom_rows(reading.cases),
        "repeats": repeat_rows(reading.cases),
        "constants": {name: constant_row(value) for name, value in constants.items()},
        "left_out": {reason: len(ids) for reason, ids in reading.left_out.items()},
    }
    has_survey, has_collectives = ((arguments.references / name).is_file() for name in (SURVEY, COLLECTIVES))
    predicted = survey.predictions(arguments.references) if has_survey else None
    collectives = collectives_fidelity.table(arguments.references) if has_collectives else None
    missed = misses(report) + (survey.misses(predicted[1]) if predicted is not None else [])
    if arguments.json:
        tables = {"survey": predicted and survey.report(predicted[1]), "collectives": collectives, "missed": missed}
        print(json.dumps(report | tables, indent=1))
    else:
        print_report(report, Console(width=120))
        if predicted is not None:
            print("\nGradient-exchange systems of the survey (Shi et al. 2020); should hold: 6% each\n")
            survey.print_report(*predicted)
        if collectives is not None:
            print("\nCollectives; should hold: median 10% fitted, 25% left out\n")
            print(collectives_fidelity.text(collectives))
        print("\nDoes not hold: " + ("; ".join(missed) or "nothing"))
    if arguments.check and missed:
        sys.exit(1)


def leave_one_out(folder: Path, cases: list[Case]) -> tuple[list[Scored], dict[str, Efficiency]]:
    """Every measured step predicted without its source, and the constants of each such fit."""
    scored, constants = [], {}
    for gpu_type, start in STARTS.items():
        timed, works, extra = _material(folder, cases, gpu_type, start)
        for source in dict.fromkeys(case.source for case in timed):
            if source not in fitted_sources(gpu_type):
                value = load_efficiency(gpu_type)
            else:
                others = [k for k, c in enumerate(timed) if c.source != source]
                more = [(case, work) for case, work in extra if case.source != source]
                others_cases = [timed[k] for k in others] + [case for case, _ in more]
                value = fit(start, others_cases, [works[k] for k in others] + [work for _, work in more])
            constants[f"{gpu_type} without {source}"] = value
            scored += [
                Scored(case=case, predicted=predicted_seconds(work, value))
                for case, work in zip(timed, works, strict=True)
                if case.source == source
            ]
    return scored, constants


def fitted_sources(gpu_type: str) -> set[str]:
    """Sources that the package's constants were fitted on; any other is predicted with those as they are."""
    origins = dict(load_efficiency(gpu_type).sources).values()
    return {name for origin in origins if origin.startswith(FITTED) for name in origin.removeprefix(FITTED).split("; ")}


def fit_all(folder: Path, cases: list[Case]) -> None:
    """Fit each GPU type on all its sources and write the package's files."""
    for gpu_type, start in STARTS.items():
        timed, works, extra = _material(folder, cases, gpu_type, start)
        value = fit(start, timed + [case for case, _ in extra], works + [work for _, work in extra])
        rows = "; ".join(sorted({case.source for case in timed}))
        for gpu in (gpu for gpu, kind in TYPES.items() if kind == gpu_type and (gpu in NUM_SMS or "-" not in gpu)):
            path = ROOT / "cost_models" / "rates" / f"{gpu}.toml"
            path.write_text(_toml(value, gpu, rows), encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        for gpu, (kind, num_sms) in BORROWED.items():
            if kind == gpu_type:
                path = ROOT / "cost_models" / "rates" / f"{gpu}.toml"
                path.write_text(_borrowed_toml(value, gpu, kind, num_sms), encoding="utf-8")
                print(f"wrote {path.relative_to(ROOT)}")


def _material(
    folder: Path, cases: list[Case], gpu_type: str, start: Efficiency
) -> tuple[list[Case], list[StepWork], list[tuple[Case, StepWork]]]:
    timed = [case for case in cases if case.seconds is not None and TYPES.get(case.gpu) == gpu_type]
    works = [case_work(case, start) for case in timed]
    return timed, works, layer_cases(folder, timed, start)


def _toml(value: Efficiency, gpu: str, rows: str) -> str:
    lines = [f"# {gpu}: parts of nominal rates that training reaches. Written by benchmarks/fidelity.py --fit", ""]
    num_sms = NUM_SMS.get(gpu, value.num_sms)
    lines.append(f'num_sms = {{ value = {num_sms}, source = "NVIDIA data sheet and architecture white paper" }}')
    start = STARTS[TYPES[gpu]]
    for key in RANGES:
        moved = abs(getattr(value, key) - getattr(start, key)) > 1e-3 * max(abs(getattr(start, key)), 1e-9)
        source = f"{FITTED}{rows}" if moved else "assumed: no measured step shows it"
        source = MEASURED[TYPES[gpu]].get(key, source)
        lines.append(f'{key} = {{ value = {getattr(value, key):.4g}, source = "{source}" }}')
    return "\n".join(lines) + "\n"


def _borrowed_toml(value: Efficiency, gpu: str, kind: str, num_sms: int) -> str:
    lines = [
        f"# {gpu}: parts of nominal rates, those of {kind}: not fitted to this GPU.",
        "# Written by benchmarks/fidelity.py --fit",
        "",
        f'borrowed = "{kind}"',
        f'num_sms = {{ value = {num_sms}, source = "NVIDIA architecture white paper" }}',
    ]
    source = f"borrowed from {kind}, not fitted to a step of {gpu}"
    lines += [f'{key} = {{ value = {getattr(value, key):.4g}, source = "{source}" }}' for key in RANGES]
    return "\n".join(lines) + "\n"


def step_time_rows(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """One row a source: mean absolute error as it is, and with one multiplier a stack."""
    rows = []
    for source in dict.fromkeys(s.case.source for s in scored):
        own = [s for s in scored if s.case.source == source]
        multiplier = {
            stack: statistics.median(s.log_error for s in own if s.case.stack == stack)
            for stack in {s.case.stack for s in own}
        }
        plain = statistics.mean(abs(exp(s.log_error) - 1) for s in own)
        corrected = statistics.mean(abs(exp(s.log_error - multiplier[s.case.stack]) - 1) for s in own)
        kind = TYPES[own[0].case.gpu]
        rows.append(
            {
                "source": source, "gpu": kind, "rows": len(own), "error": plain, "with_multiplier": corrected,
                "stacks": len(multiplier), "bias": statistics.mean(s.log_error for s in own),
                "holds": [plain <= LIMITS[kind][0], corrected <= LIMITS[kind][1]],
            }
        )  # fmt: skip
    return rows


def layout_rows(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """One row a group of layouts: the regret of the fastest predicted of those predicted to fit, which is what a
    planner takes; of the fastest predicted of all that ran; and of the mean layout."""
    predicted = {id(s.case): s.predicted for s in scored}
    rows = []
    for members in groups([s.case for s in scored]):
        times = {id(case): float(case.seconds or 0) for case in members}
        best = min(times.values())
        fitting = [case for case in members if not runs_out(case)] or members
        chosen, fastest = (min(cases, key=lambda case: predicted[id(case)]) for cases in (fitting, members))
        rows.append(
            {
                "source": chosen.source,
                "group": chosen.stack if chosen.source != "BLOOM" else members[0].shape.name,
                "layouts": len(members),
                "chosen": chosen.id,
                "regret": times[id(chosen)] / best,
                "by_time_alone": times[id(fastest)] / best,
                "mean_layout": statistics.mean(times.values()) / best,
            }
        )
    return rows


def runs_out(case: Case) -> bool:
    """Whether the case is predicted to need more memory than its device has."""
    need = step_memory(case.shape, case.config).with_reserve("nvidia-smi")
    return need > case.cluster.device.memory_bytes * GIB_A_GB


def memory_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One row a source that prints peaks: mean absolute error of the quantity it prints."""
    rows = []
    measured = [case for case in cases if case.peak_bytes is not None]
    for source in dict.fromkeys(case.source for case in measured):
        own = [case for case in measured if case.source == source]
        errors = [step_memory(c.shape, c.config).with_reserve(c.peak_kind) / float(c.peak_bytes or 1) - 1 for c in own]
        mean = statistics.mean(abs(e) for e in errors)
        rows.append(
            {
                "source": source,
                "quantity": own[0].peak_kind,
                "rows": len(own),
                "error": mean,
                "bias": statistics.mean(errors),
            }
        )
    return rows


def oom_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Labels of the sources that print which layouts ran out of memory."""
    rows = []
    for source in dict.fromkeys(case.source for case in cases if case.out_of_memory):
        pairs = [(runs_out(case), case.out_of_memory) for case in cases if case.source == source]
        right = sum(said == was for said, was in pairs)
        both = sum(said and was for said, was in pairs)
        rows.append(
            {
                "source": source, "rows": len(pairs), "right": right, "accuracy": right / len(pairs),
                "precision": both / max(1, sum(said for said, _ in pairs)),
                "recall": both / max(1, sum(was for _, was in pairs)),
            }
        )  # fmt: skip
    return rows


def misses(report: dict[str, Any]) -> list[str]:
    """What should hold and does not, in words."""
    found = []
    for row in report["step_time"]:
        for limit, key, holds in zip(LIMITS[row["gpu"]], ("error", "with_multiplier"), row["holds"], strict=True):
            if not holds:
                found.append(f"{row['source']}: {key} {_percent(row[key])}, should be {_percent(limit)}")
    regrets = [row["regret"] for row in report["layouts"] if row["source"] in SEARCHES] or [1.0]
    for name, value, limit in (
        ("mean", statistics.mean(regrets), MEAN_REGRET),
        ("max", max(regrets), MAX_REGRET),
    ):
        if value > limit:
            found.append(f"layout choice: {name} regret {value:.3f}, should be {limit}")
    right, labels = _right_labels(report["oom"])
    if right < OOM_RIGHT * labels:
        found.append(f"out of memory: {right} of {labels} right, should be {_percent(OOM_RIGHT)}")
    if (error := _memory_error(report["memory"])) > MEMORY_ERROR:
        found.append(f"peak memory: {_percent(error)}, should be {_percent(MEMORY_ERROR)}")
    return found


def _right_labels(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    return sum(r["right"] for r in rows), sum(r["rows"] for r in rows)


def _memory_error(rows: Sequence[dict[str, Any]]) -> float:
    return float(sum(r["rows"] * r["error"] for r in rows) / max(1, sum(r["rows"] for r in rows)))


def constant_row(value: Efficiency) -> dict[str, Any]:
    """A fit's constants and which of them lie at an end of their physical range."""
    at_end = [
        key
        for key, (low, high) in RANGES.items()
        if min(getattr(value, key) - low, high - getattr(value, key)) < 1e-3 * (high - low)
    ]
    return {**{key: round(getattr(value, key), 7) for key in RANGES}, "at_an_end": at_end}


def print_report(report: dict[str, Any], console: Console) -> None:
    """The tables, and under each the line that should hold."""
    time = [
        {**r, "error": _percent(r["error"]), "bias": _percent(r["bias"]), "holds": _yes(r["holds"]),
         "with_multiplier": f"{_percent(r['with_multiplier'])} ({r['stacks']})"}
        for r in report["step_time"]
    ]  # fmt: skip
    _print(console, "Step time, leave one source out", time, "should hold: A100 8% and 5%, H100 15% and 8%")
    layouts = [
        {**r, **{key: f"{r[key]:.3f}" for key in ("regret", "by_time_alone", "mean_layout")}} for r in report["layouts"]
    ]
    _print(console, "Layout choice", layouts, _regrets(report["layouts"]))
    oom = [{**r, **{key: f"{r[key]:.3f}" for key in ("accuracy", "precision", "recall")}} for r in report["oom"]]
    right, rows = _right_labels(report["oom"])
    _print(console, "Out of memory", oom, f"all: {_percent(right / max(1, rows))} right; should hold: 95%")
    memory = [{**r, "error": _percent(r["error"]), "bias": _percent(r["bias"])} for r in report["memory"]]
    note = f"all: {_percent(_memory_error(report['memory']))}; should hold: 8%"
    _print(console, "Peak memory", memory, note)
    shares, ratios = ("deviation", "within_a_stack"), ("largest_ratio", "batch_ratio", "worst")
    repeats = [
        {**r, **{key: _percent(r[key]) for key in shares}, **{key: f"{r[key]:.3f}" for key in ratios}}
        for r in report["repeats"]
    ]
    _print(console, "Repeats", repeats, "how far runs of one layout are from their median: no model can be nearer")
    left_out = "; ".join(f"{number} {reason}" for reason, number in report["left_out"].items())
    console.print(f"Left out: {left_out or 'nothing'}", highlight=False)


def _regrets(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for source in dict.fromkeys(r["source"] for r in rows):
        own = [r["regret"] for r in rows if r["source"] == source]
        parts.append(f"{source}: {len(own)} groups, mean {statistics.mean(own):.3f}, max {max(own):.3f}")
    for name, key in (("all", "regret"), ("all, by time alone", "by_time_alone")):
        every = [r[key] for r in rows]
        if every:
            parts.append(f"{name}: {len(every)} groups, mean {statistics.mean(every):.3f}, max {max(every):.3f}")
    return "\n".join([*parts, "should hold: mean 1.03, max 1.15"])


def _yes(holds: Sequence[bool]) -> str:
    return "/".join("yes" if each else "NO" for each in holds)


def _print(console: Console, title: str, rows: Sequence[dict[str, Any]], note: str) -> None:
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    console.print(table, highlight=False)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


if __name__ == "__main__":
    main()
