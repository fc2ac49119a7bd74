"""Do masked attention, message passing, tables, recurrent nets and models of science train as one process does?

    python -m benchmarks.verify_others [--kinds masked,messages] [--models NAME;NAME] [--meshes 2x2] [--random 20]
                                       [--write PAGE]

As `verify_families`, of the small models of tests/other_models.py. What is written is a table: a row a model, with the
calls that no rank shares with another though they depend on the model's inputs.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.rules.describe import result_values
from autopar.rules.registry import rule_of
from autopar.values.graph import CapturedModel, operands, target_name
from autopar.values.mesh import parse_mesh
from autopar.verification import TOLERANCES
from benchmarks.verify_families import Verified, verified
from tests.other_models import KINDS, other_model


def whole(captured: CapturedModel) -> dict[str, int]:
    """Calls that depend on inputs and can only run whole: by op, how many."""
    reached = {spec.placeholder for spec in captured.inputs}
    found: dict[str, int] = {}
    for node in captured.graph.nodes:
        if node.op != "call_function" or not any(source.name in reached for source in operands(node)):
            continue
        reached.add(node.name)
        if not rule_of(node).factors and any(value.numel() > 1 for value in result_values(node)):
            name = target_name(node.target).removeprefix("aten.")
            found[name] = found.get(name, 0) + 1
    return found


def row(name: str, captured: CapturedModel, found: list[Verified]) -> str:
    """A line of the table."""
    worst = [max((v.worst[i] for v in found), key=abs) for i in range(3)]
    plans = sum(len(v.plans) for v in found)
    failed = sum(len(v.failed) for v in found)
    kinds = sorted({kind for v in found for check in v.failed for kind in check.wrong(*TOLERANCES["fp64"])})
    calls = sum(node.op == "call_function" for node in captured.graph.nodes)
    ops = ", ".join(f"`{op}` ({n})" for op, n in whole(captured).items()) or "none"
    numbers = f"{worst[0]:.0e} | {worst[1]:.0e} | {worst[2]:+.1%}"
    return f"| {name} | {calls} | {ops} | {plans} | {numbers} | {failed} {' '.join(kinds)} |"


REASONS = """## Not split, and why

- Hidden units of a recurrent net: every step reads the whole state of the step before, so that ranks would gather it at
  every step, forward and backward; ranks that split the batch send nothing. A net on rows packed by length is not
  captured: its sizes are values.
- Nodes that edges are summed into: which node an edge goes to is known only when the model runs. Edges are split, and
  their sums are reduced and scattered over nodes. Of maxima, means with other weights and products edges stay whole.
- Bags by offsets: ids are split instead, of which every rank sums those that it holds.
- A whole table on one rank: a split of every table's columns sends as many bytes and is balanced.
- Dims that a transform runs along, and the matrix whose determinant a flow takes, which has no batch.
- `ctc_loss`: sizes of its saved tensors are values; it is not captured. FlexAttention: torch has no backward of it on a
  CPU, and block masks are not made in a traced forward; attention under a mask tensor is split instead."""
"""What the table does not say."""
HEAD = "| model | calls | whole | plans | loss | gradient | peak | failed |\n|---|---|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--models", help="names within the kinds, separated by semicolons; all by default")
    parser.add_argument("--meshes", default="2x2")
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="the page that the table is written to")
    arguments = parser.parse_args()
    console = Console(width=200)
    meshes = [parse_mesh(text) for text in arguments.meshes.split(",")]
    lines: list[str] = []
    refused: list[str] = []
    num_failed = 0
    named = arguments.models.split(";") if arguments.models else None
    for name in (f"{kind}: {model}" for kind in arguments.kinds.split(",") for model in KINDS[kind]):
        if named is not None and name.partition(": ")[2] not in named:
            continue
        model, kwargs = other_model(name, dtype=torch.float64)
        try:
            captured = capture(model, (), kwargs, name=type(model).__name__)
        except AutoparError as error:
            refused.append(f"- {name}: {error}")
            console.print(refused[-1], style="dim", highlight=False)
            continue
        found = list(verified(captured, model, kwargs, meshes, arguments.random, arguments.seed))
        lines.append(row(name, captured, found))
        console.print(lines[-1], highlight=False)
        for check in (check for v in found for check in v.failed):
            num_failed += 1
            console.print(f"    {check.plan}: {check}", style="red", highlight=False)
    if arguments.write:
        arguments.write.write_text(page(arguments, lines, refused))
    console.print(f"{len(lines)} models, {num_failed} plans failed")
    return 1 if num_failed else 0


def page(arguments: argparse.Namespace, lines: list[str], refused: list[str]) -> str:
    models = f'--models "{arguments.models}" ' if arguments.models else ""
    command = f"python -m benchmarks.verify_others {models}--meshes {arguments.meshes} --random {arguments.random}"
    parts = [
        "# Masked and packed sequences, graphs, tables, recurrent nets, science",
        f"Written by `{command}` with torch {torch.__version__}.",
        "Small float64 models, real Gloo processes, the best plan, every baseline that applies and random plans, three "
        "steps each: loss (1e-10) and every gradient on every rank (1e-8) against the eager module, bytes as counted, "
        "peaks of every rank within 5% of the prediction. *Whole*: calls that depend on the inputs without a dim that "
        "can be split.",
        "\n".join([HEAD, *lines]),
        *(["## Not captured", "\n".join(refused)] if refused else []),
    ]
    return "\n\n".join([*parts, REASONS]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
