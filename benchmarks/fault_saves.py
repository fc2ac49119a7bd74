"""Where in a save does a fault strike? Before and after each meeting of ranks, and inside the phases between them.

Events of a save are those of `runtime.saving`: meetings are known by what ranks say they are there for.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import filesystem

from autopar.runtime import checkpoint, checkpoint_group, checkpoint_root, saving
from benchmarks.fault_points import Point, Watch

SAVE = "save"
SLOW_SECONDS = 0.3
"""How long each file takes to be on disk where a save is to last over several steps."""

_MEETINGS = (
    "copying step",
    "beginning step",
    "writing step",
    "checking step",
    "writing the manifest of step",
    "naming step",
    "deleting old checkpoints",
)
"""What ranks meet for, in order."""

EVERY_RANK = {
    "before copying": Point(SAVE, "copying"),
    **{
        f"{when} ranks meet: {what}": Point(SAVE, f"{when} {what}")
        for what in _MEETINGS
        for when in ("before", "after")
    },
    "before tensors are written": Point(SAVE, "tensors"),
    "in the middle of writing tensors": Point(SAVE, "tensor", "middle"),
    "when files are flushed to disk": Point(SAVE, "flush", "middle"),
}
"""Points that each rank comes to."""

FIRST_RANK = {
    "manifest written, not in place": Point(SAVE, "replace", "last"),
    "manifest in place, folder not named": Point(SAVE, "naming"),
    "folder named, name not flushed": Point(SAVE, "renamed", "last"),
    "an old one has lost its name": Point(SAVE, "deleting"),
    "an old one is deleted in part": Point(SAVE, "unlinked"),
}
"""Points of rank 0, which alone does these things."""

BESIDE = {
    "a save waits for one that is being written": Point(SAVE, "waiting"),
}
"""Points of a second asynchronous save, which begin when the first has copied."""


def watch_saves(watch: Watch, begin: Callable[[int], None], *, slow: bool) -> None:
    """From now on saves are counted; `begin` is called with the step of each."""
    watch.phase = SAVE
    copy, meet, flush, finish = checkpoint.copy_state, checkpoint_group._gathered, os.fsync, checkpoint.finish_saving

    def copying(*args: Any) -> Any:
        begin(args[3])
        watch.saw("copying")
        return copy(*args)

    def meeting(what: str, own: Any, group: Any) -> Any:
        named = re.sub(r" ?\d+$", "", what)
        watch.saw(f"before {named}")
        answers = meet(what, own, group)
        watch.saw(f"after {named}")
        return answers

    def flushing(handle: int) -> None:
        time.sleep(SLOW_SECONDS if slow else 0.0)
        watch.saw("flush")
        flush(handle)

    def finishing() -> None:
        thread = saving._beside.thread
        if thread is not None and thread.is_alive():
            watch.saw("waiting")
        finish()

    checkpoint.copy_state, checkpoint_group._gathered = copying, meeting
    os.fsync, checkpoint.finish_saving = flushing, finishing
    watch.watch(saving, "write_tensors", "tensors")
    watch.watch(filesystem, "_write_item", "tensor")
    watch.watch(os, "replace", "replace")
    watch.watch(checkpoint_root, "rename", "naming")
    watch.watch(os, "rename", "rename", "renamed")
    watch.watch(shutil, "rmtree", "deleting")
    watch.watch(os, "unlink", "unlink", "unlinked")
