"""What does each of the demo's processes run? The user's side of distributed training, started by torchrun:

    torchrun --nproc-per-node 4 -m examples.demo.worker out/demo/plan.json

Rank 0 prints one JSON object `{"step", "loss"}` a line after each step.
"""

import json
import os
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import autopar
from examples.demo.data import batches, corpus
from examples.demo.model import GLOBAL_BATCH, SEQUENCE, llama
from examples.demo.training import LEARNING_RATE, NUM_STEPS, train


def report(step: int, loss: float) -> None:
    if os.environ["RANK"] == "0":
        print(json.dumps({"step": step, "loss": loss}), flush=True)


@record  # torchrun then ends its report with the traceback of the first rank that failed
def main(plan_file: str) -> None:
    model, _ = llama()
    module = autopar.distribute(model, autopar.load_plan(plan_file))
    steps = batches(corpus(), num_steps=NUM_STEPS, batch=GLOBAL_BATCH, sequence=SEQUENCE)
    train(module, steps, LEARNING_RATE, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
