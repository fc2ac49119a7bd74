"""Which published times are of one layer? Korthikanti et al. 2022, table 4: milliseconds forward and backward.

They separate what a whole step mixes: matrix products, memory-bound operations and tensor-parallel communication.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from autopar.cost_models.data_exchange import NOTHING_EXCHANGED
from autopar.cost_models.efficiency import Efficiency
from autopar.cost_models.layer_work import Kind, layer_work
from autopar.cost_models.step_work import StepWork, tensor_work
from benchmarks.reference_rows import Case

MODEL = "kort-t5-22B-full"  # the step measurement of the same model, on the same devices
PASSES = {"forward time per layer": "forward", "backward time per layer": "backward"}
TECHNIQUES = {
    "Baseline no recompute": {"recompute": "none"},
    "Sequence Parallelism": {"recompute": "none", "sequence_parallel": True},
    "Baseline with recompute": {"recompute": "full"},
    "Selective Recompute": {"recompute": "selective"},
    "Selective + Sequence": {"recompute": "selective", "sequence_parallel": True},
}


def layer_cases(folder: Path, cases: list[Case], start: Efficiency) -> list[tuple[Case, StepWork]]:
    """Cases of one pass over one layer and their work; none if the folder has no such file or model."""
    file = folder / "korthikanti_layers_and_memory.csv"
    model = next((case for case in cases if case.id == MODEL), None)
    if model is None or not file.is_file():
        return []
    found = []
    with file.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row["quantity"] not in PASSES or row["technique"] not in TECHNIQUES:
                continue
            config = replace(model.config, **TECHNIQUES[row["technique"]])  # type: ignore[arg-type]
            work = layer_work(model.shape, config, model.cluster.device, start.num_sms)
            work += tensor_work(model.shape, config, model.cluster, start)
            forward = PASSES[row["quantity"]] == "forward"
            seconds = work.forward if forward else work.backward + work.weight + work.recompute
            nothing = np.zeros((1, len(Kind)))
            step = StepWork(
                config=config,
                counts=np.ones(1),
                forward=seconds[None],
                backward=nothing,
                weight=nothing,
                exchange=NOTHING_EXCHANGED,
                optimizer_seconds=0.0,
                host_seconds=0.0,
            )
            found.append((replace(model, id=row["id"], config=config, seconds=float(row["value"]) / 1e3), step))
    return found
