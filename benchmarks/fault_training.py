"""What does a rank train while faults strike? A small float64 model with dropout, batch statistics and tied weights.

It saves after steps 1, 2 and 4 (3, where a save is to meet another), and faults strike in step 3 or in the save after
step 2. After every step it notes a digest of all that training goes on from, so that two runs are compared exactly.
"""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import tests.runtime_cases as cases
from autopar.runtime import finish_saving, init, load, save
from autopar.runtime.private_torch import local_tensor
from benchmarks.fault_cases import DROPOUT, STEPS, Fault, Job, plan_of
from benchmarks.fault_points import Watch
from benchmarks.fault_saves import watch_saves
from tests import word_pipelines

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Training:
    """One rank's."""

    def __init__(self, job: Job) -> None:
        plan = plan_of(job.kind)
        self.job, self.is_staged = job, job.is_staged
        make: Any = word_pipelines.pipelined if self.is_staged else cases.distributed
        self.module = make(plan if self.is_staged else plan.single, DROPOUT, seed=5)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def step(self, number: int, watch: Watch) -> None:
        watch.enter("data")
        batch = self._batch()
        watch.enter("forward")
        if self.is_staged:
            self.module.train_step(batch)
        else:
            loss = self.module(**batch).loss
            watch.enter("between")
            watch.enter("backward")
            loss.backward()
        watch.enter("clipping")
        if self.is_staged:
            self.module.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        watch.enter("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        watch.enter("evaluation")
        self.module.eval()
        with torch.no_grad():
            self.module(**batch)
        self.module.train()
        watch.enter("after")

    def _batch(self) -> dict[str, Tensor]:
        """Of this process's own random stream, which is the same on every rank."""
        seed = int(torch.randint(2**31, ()))
        return word_pipelines.batch(seed) if self.is_staged else cases.batch(seed)

    def save(self, step: int) -> None:
        save(
            self.module,
            self.optimizer,
            self.job.root,
            step=step,
            scheduler=self.scheduler,
            keep=1,
            asynchronous=self.job.asynchronous,
        )

    def load(self) -> int:
        return load(self.module, self.optimizer, self.job.root, scheduler=self.scheduler).step

    def digest(self) -> str:
        """Of parameters, buffers, optimizer state, learning rates and random streams, bit for bit."""
        found = hashlib.sha256()
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, value in sorted(named.items()):
            found.update(name.encode() + local_tensor(value.detach()).contiguous().numpy().tobytes())
        for group in self.optimizer.param_groups:
            found.update(repr(group["lr"]).encode())
            for parameter in group["params"]:
                for name, value in sorted(self.optimizer.state[parameter].items()):
                    found.update(name.encode() + local_tensor(value).contiguous().numpy().tobytes())
        found.update(repr((self.module.seed, self.module.num_calls, self.module.num_evaluated)).encode())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


def train(job: Job, rank: int) -> None:
    """What a rank does; faults strike if one is its own."""
    torch.manual_seed(11)
    init(timeout_seconds=job.timeout_seconds)
    training = Training(job)
    fault = job.fault if job.fault is not None and job.fault.rank == rank else None
    strike = _strike(job, fault)
    steps, saves = Watch(strike), Watch(strike)
    at_save = fault is not None and fault.in_save

    def begin_save(step: int) -> None:
        saves.begin(fault.target if fault is not None and at_save and step == fault.step else None)

    if job.fault is not None:
        steps.watch_all()
        watch_saves(saves, begin_save, slow=job.slow)
    first = 0
    if job.resumes:
        first = training.load()
        _note(job, rank, first, training)
    with steps if fault is not None and not at_save else nullcontext():
        for number in range(first + 1, STEPS + 1):
            steps.begin(fault.target if fault is not None and not at_save and number == fault.step else None)
            training.step(number, steps)
            _note(job, rank, number, training)
            if number in job.saved_steps:
                training.save(number)
    finish_saving()


def _note(job: Job, rank: int, step: int, training: Training) -> None:
    with job.digests(rank).open("a") as file:
        file.write(json.dumps([step, training.digest()]) + "\n")


def _strike(job: Job, fault: Fault | None) -> Callable[[], None]:
    """What happens to this rank; the moment is noted in a file."""

    def strike() -> None:
        assert fault is not None
        job.noted().write_text(repr(time.monotonic()))
        if fault.how in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.how])
        elif fault.how == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", job.root], check=True)

    return strike
