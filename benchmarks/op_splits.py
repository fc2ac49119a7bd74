"""Along which dims does every op that torch tests split, by execution and by our rules?

    python -m benchmarks.op_splits [--ops add,nn.functional.pad] [--samples 2] [--processes 2] [--seconds 120]
                                   [--write docs/results/op-splits.md]

torch's own samples (`op_db`; needs `expecttest`) are captured; each call of their graphs, on the values that it has
there, is run on ranks by every choice of its rule, and once more as if there were no rule (`rules.discover`). A choice
that ranks refute is wrong; one that running finds and the rule has not is lacking. Ops run in processes of their own.
Exit code 1 if any choice is wrong.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.ops.random import use_draws
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.rules.discovered import discovered_rule, is_tried, node_constants
from autopar.rules.registry import rule_of
from autopar.rules.rule import Choice, choices, is_splittable, splits
from autopar.values.graph import CapturedModel, called_name, is_random, operands
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from autopar.values.placement import Placement, Shard
from benchmarks.op_db_samples import Sample, SampleModel, fails_in_eager, one_line, samples_of, tables
from tests.ranks_in_threads import run_in_threads
from tests.rules_on_ranks import DRAWS, check_node, one_after_the_other, sends

FORK = multiprocessing.get_context("fork")
RANKS = (2, 3, 5, 7)
"""How many ranks a choice is tried on: the first that it divides over."""
SAID = (
    "Each call of the graphs of `op_db`'s samples (float64), on the values that it has there. Written: a rule of ours;",
    "discovered: what running the call shows; whole: nothing is shown to be independent. Choices of rules, sums that",
    "pass through among them, are run on ranks, values and gradients; wrong ones are refuted. Lacking: calls that a",
    "written rule splits less than running them does. Scalars and dims of size 1 are among the calls of no splits.",
)
EVERY = 20
"""After how many ops the page is written."""
KINDS = ("written", "discovered", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A call of a sample's graph. op: of `op_db`; called: of ATen. kind: of its rule, one of `KINDS`. splits: how many
    it has; wrong, lacking: in words."""

    op: str
    called: str
    kind: str
    splits: int
    wrong: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Said:
    """What the process of an op says: rows, keys of the calls that it looked at, and why samples have none."""

    rows: list[Row] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)


def look_at(op: str, most: int, seen: set[Any]) -> Said:
    """The rows of an op's samples, of calls that were not seen."""
    said = Said()
    for sample in samples_of("op", op, most):
        if sample.key.dtype != "float64" or sample.key.variant or (why := fails_in_eager(sample)):
            said.skipped.append(why if sample.key.dtype == "float64" and not sample.key.variant else "another dtype")
            continue
        try:
            for node, values in calls(sample):
                key = (called_name(node), node_constants(node), tuple((tuple(v.shape), v.dtype) for v in values))
                if key not in seen | said.seen:
                    said.seen.add(key)
                    said.rows.append(row_of(op, node, values))
        except AutoparError as error:
            said.skipped.append(one_line(error))
    return said


def calls(sample: Sample) -> list[tuple[fx.Node, list[Tensor]]]:
    """The calls of a sample's graph, and the values of their operands there."""
    model = SampleModel([sample])
    captured = capture(model, model.inputs(), repeats=())
    values = values_of(captured, model)
    return [
        (node, [values[s] for s in operands(node)])
        for node in captured.graph.nodes
        if node.op == "call_function"
        and operands(node)
        and isinstance(node.target, torch._ops.OpOverload)
        and all(isinstance(values[s], Tensor) for s in operands(node))
    ]


def values_of(captured: CapturedModel, model: SampleModel) -> dict[fx.Node, Any]:
    """What each node of the graph is."""
    given = {k: v.detach() for k, v in (parameters_of(captured, model) | buffers_of(captured, model)).items()}
    given |= bind_inputs(captured.inputs, model.inputs(), {}) | dict(captured.constants)
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), use_draws(DRAWS):
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                values[node] = given[node.name]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def row_of(op: str, node: fx.Node, values: list[Tensor]) -> Row:
    rule = rule_of(node)
    kind = "whole" if not rule.known else "discovered" if rule.discovered else "written"
    offered = [c for c in choices(rule) if c.name not in ("replicate", "invariant")]
    wrong = tuple(f"{words(c)}: {why}" for c in offered if (why := refuted(node, values, c)))
    lacking: tuple[str, ...] = ()
    if kind == "written" and is_tried(node) and not is_random(node):
        known = {(c.operands, c.results) for c in offered}
        found = [c for c in choices(discovered_rule(node)) if splits(c.name)]
        lacking = tuple(words(c) for c in found if (c.operands, c.results) not in known)
    count = sum(splits(c.name) for c in offered)
    return Row(op=op, called=called_name(node), kind=kind, splits=count, wrong=wrong, lacking=lacking)


def refuted(node: fx.Node, values: list[Tensor], choice: Choice) -> str:
    """What ranks make otherwise than the whole call, "" for nothing; nothing is said of sizes that no mesh divides."""
    rule = rule_of(node)
    for size in RANKS:
        mesh = make_mesh((size,))
        if not is_splittable(rule, (choice,), mesh):
            continue
        run = run_apart if sends(node, rule, (choice,), mesh) else one_after_the_other
        try:
            check_node(node, values, mesh, (choice,), run)
        except Exception as error:
            return one_line(error)
        return ""
    return ""


def run_apart(mesh: Any, one_rank: Any) -> list[Any]:
    """Ranks as threads, which meet."""
    found: list[Any] = run_in_threads(mesh, one_rank)[0]
    return found


def words(choice: Choice) -> str:
    def said(placements: Sequence[Placement]) -> str:
        return ", ".join(f"dim {p.dim}" if isinstance(p, Shard) else str(p) for p in placements)

    return f"{said(choice.operands)} -> {said(choice.results)}"


def run_all(ops: Sequence[str], most: int, processes: int, seconds: float) -> Iterator[tuple[str, Said]]:
    """What is said of each op, that many at a time; those whose process dies or is late are skipped with a word."""
    waiting, running, seen = list(reversed(ops)), dict[Any, Any](), set[Any]()
    while waiting or running:
        while waiting and len(running) < processes:
            ours, theirs = FORK.Pipe(duplex=False)
            op = waiting.pop()
            process = FORK.Process(target=_work, args=(theirs, op, most, seen))
            process.start()
            theirs.close()
            running[ours] = op, process, time.monotonic()
        wait(list(running), timeout=1.0)
        for pipe, (op, process, began) in list(running.items()):
            late = time.monotonic() - began > seconds
            if not (pipe.poll() or late or not process.is_alive()):
                continue
            try:
                said: Said = pipe.recv() if pipe.poll() else Said(skipped=["its process takes too long"])
            except EOFError:
                said = Said(skipped=["its process ended"])
            process.kill()
            process.join()
            del running[pipe]
            seen |= said.seen
            yield op, said


def _work(pipe: Any, op: str, most: int, seen: set[Any]) -> None:
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # ops of torch's tests print
    warnings.simplefilter("ignore")
    try:
        pipe.send(look_at(op, most, seen))
    except Exception as error:
        pipe.send(Said(skipped=[one_line(error)]))


def page(found: Sequence[tuple[str, Said]], command: str) -> str:
    """The table by op of ATen, and what is lacking, wrong or skipped."""
    rows = [row for _, said in found for row in said.rows]
    by_op: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r.called):
        by_op.setdefault(row.called, []).append(row)
    looked_at = [said for _, said in found if said.rows]
    lacking = sum(bool(r.lacking) for r in rows)
    lines = [
        "# Splits of torch's own samples: by execution, and by our rules",
        "",
        f"Written by `{command}` with torch {torch.__version__}.",
        "",
        *SAID,
        "",
        "| ops of op_db | with calls seen first there | calls | written | discovered | whole | wrong | lacking |",
        "|---|---|---|---|---|---|---|---|",
        f"| {len(found)} | {len(looked_at)} | {len(rows)} | "
        + " | ".join(str(sum(r.kind == kind for r in rows)) for kind in KINDS)
        + f" | {sum(len(r.wrong) for r in rows)} | {lacking} |",
        "",
        "| op of the graph | calls | written | discovered | whole | splits a call | wrong | lacking |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for called, its in by_op.items():
        kinds = " | ".join(str(sum(r.kind == kind for r in its)) for kind in KINDS)
        mean = sum(r.splits for r in its) / len(its)
        counts = f"{mean:.1f} | {sum(len(r.wrong) for r in its)} | {sum(bool(r.lacking) for r in its)}"
        lines.append(f"| {called} | {len(its)} | {kinds} | {counts} |")
    for title in ("wrong", "lacking"):
        lines += ["", f"## {title.capitalize()}", ""]
        listed = [
            f"- `{called}`: {what}"
            for called, its in by_op.items()
            for what in dict.fromkeys(itertools.chain.from_iterable(getattr(r, title) for r in its))
        ]
        lines += listed or ["None."]
    lines += ["", "## Ops without a call that was looked at", ""]
    reasons: dict[str, list[str]] = {}
    for op, said in found:
        if not said.rows:
            reasons.setdefault((said.skipped or ["all its calls were seen before"])[0], []).append(op)
    lines += [f"- {why}: {', '.join(ops)}" for why, ops in sorted(reasons.items(), key=lambda item: -len(item[1]))]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="longest that one op may take")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    look_at("mul", 1, set())  # what torch.export imports at its first call, once for all processes
    ops = arguments.ops.split(",") if arguments.ops else list(tables()["op"])
    found: list[tuple[str, Said]] = []
    for op, said in run_all(ops, arguments.samples, arguments.processes, arguments.seconds):
        found.append((op, said))
        for row in said.rows:
            for what in row.wrong:
                print(f"wrong {op} {row.called}: {what}", flush=True)
        if len(found) % EVERY and len(found) < len(ops):
            continue
        text = page(found, "python -m benchmarks.op_splits " + " ".join(sys.argv[1:]))
        if len(found) < len(ops):
            text += f"\nOf {len(ops)} ops {len(found)} are here: it was ended early.\n"
        if arguments.write:
            arguments.write.write_text(text)
    print(text)
    return 1 if any(row.wrong for _, said in found for row in said.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
