"""Options that several commands take, each in its group of the help."""

from pathlib import Path
from typing import Annotated, Any

import typer

WHAT = "What is planned"
LAYOUT = "Mesh and micro-batches"
SEARCH = "The search"
OUTPUT = "What is written"
FILE = "The plan's model"
MACHINE = "Where it runs"
PLANS = "Which plans"


def option(group: str, *names: str, **more: Any) -> Any:
    """A typer option in a group of the help; `more` as for `typer.Option`."""
    return typer.Option(*names, rich_help_panel=group, **more)


Model = Annotated[
    str, typer.Argument(help="file.py:function or module:function (returns model and inputs), or hf:config.json")
]
Set = Annotated[
    list[str] | None,
    option(WHAT, "--set", metavar="KEY=VALUE", help="override a key of the config or a parameter of the function"),
]
Batch = Annotated[
    int | None, option(WHAT, "--global-batch", help="samples a step over all devices; else the function's, of hf: 8")
]
Seq = Annotated[int | None, option(WHAT, "--seq", help="tokens a sample; else the function's, of hf: 512")]
Precision = Annotated[
    str | None,
    option(WHAT, help="fp32 (unless said), bf16-mixed (computes in bf16, keeps fp32 weights), bf16 or fp64"),
]
ReduceDtype = Annotated[str | None, option(WHAT, help="fp32 or fp64, in which ranks sum gradients")]
Optimizer = Annotated[str, option(WHAT, help="adamw, adam, sgd or sgd-momentum; with -fused torch's fused=True")]
NoCheck = Annotated[bool, option(WHAT, "--no-check", help="skip comparing the graph with the module")]

Cluster = Annotated[str, option(WHAT, help="8xh100, 64x8xh100 (nodes x GPUs), 4xcpu, or a TOML file")]
Memory = Annotated[float | None, option(WHAT, "--memory-gb", help="memory limit a device, in 1e9 bytes")]

Mesh = Annotated[
    str | None, option(LAYOUT, help="ranks along each axis: 2x2, 8 or data=2,model=2, or auto for the best")
]
Microbatches = Annotated[
    str | None,
    option(
        LAYOUT,
        help="parts of the global batch whose gradients add up: a number or auto, the best; 1 for one given mesh",
    ),
]
Pipeline = Annotated[str | None, option(LAYOUT, help="pipeline ranks, --mesh that of each; 1 for none; auto the best")]
Schedule = Annotated[str, option(LAYOUT, help="of a pipeline: gpipe, 1f1b or interleaved-1f1b, or auto")]

Baseline = Annotated[str | None, option(SEARCH, help="ddp, fsdp, megatron or ulysses, with keys as in megatron:tp=8")]
Solver = Annotated[str, option(SEARCH, help="auto, ilp (with a proof) or double-recursive (at once)")]

Pin = Annotated[
    list[str] | None,
    option(
        SEARCH, metavar="PATTERN: WORDS", help="what the plan must respect: '*.attn.*: model=heads'; may be repeated"
    ),
]
PinsOf = Annotated[Path | None, option(SEARCH, "--pins", help="a TOML or JSON file of pins")]

ModelOf = Annotated[
    str | None, option(FILE, "--model", help="the plan's model, as for autopar plan; with --set as then")
]
Trust = Annotated[bool, option(FILE, "--trust", help="run the model that the plan's file names: its code, its --set")]
PlanFile = Annotated[Path, typer.Argument(help="a plan.json that autopar plan wrote")]

Trace = Annotated[Path | None, option(OUTPUT, help="write the step's timeline for ui.perfetto.dev here")]
Json = Annotated[bool, option(OUTPUT, "--json", help="print one JSON object and nothing else")]
