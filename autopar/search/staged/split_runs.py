"""Which tasks of a stage's backward pass does each of its two parts run?

As `runtime.split_backward` cuts it (`split_passes`). A head runs in both: first towards what is on the way, later
towards its branch, and what it gathers for that is gathered twice. A product has one for each of its operands, so
together they take what the whole does; any other head reads twice what it keeps. Collectives inside a head run once,
in the first part. Autograd takes all that a head has saved whenever it runs, so a replay is the first part's if any
reader is. What is paid once a step follows the second part, which ends last.
"""

from dataclasses import replace

from autopar.lower.live import Live
from autopar.plan import Plan
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.runs import Runs, Task
from autopar.search.staged.split_passes import Cut, find_cut, replayed_late


def split_backward(plan: Plan, runs: Runs, live: Live, pricer: Pricer) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """The tasks of both parts, each in the order of the whole."""
    cut = find_cut(live)
    late = replayed_late(live, cut)
    first: list[Task] = []
    second: list[Task] = []
    for task in runs.backward:
        if task.once:
            second.append(task)
        elif task.again:
            (second if task.call in late else first).append(task)
        else:
            for part, own in zip((first, second), _halves(task, plan, live, pricer, cut), strict=True):
                part += own
    return tuple(first), tuple(second)


def _halves(task: Task, plan: Plan, live: Live, pricer: Pricer, cut: Cut) -> tuple[list[Task], list[Task]]:
    """What each part runs of a call's backward pass, and of a gather for it."""
    call = live.calls[task.call]
    wanted = [slot for slot, has_gradient in enumerate(call.gradients) if has_gradient]
    later = frozenset(slot for slot in wanted if call.operands[slot] in cut.later)
    if not later:
        return [task], []
    if len(later) == len(wanted):
        return [], [task]
    if task.makes[0][0] == "gathered":
        return [task], [task]
    if task.inside:
        return [task], []
    return (
        [_towards(task, frozenset(wanted) - later, plan, live, pricer)],
        [_towards(task, later, plan, live, pricer)],
    )


def _towards(task: Task, slots: frozenset[int], plan: Plan, live: Live, pricer: Pricer) -> Task:
    """A head's backward pass, the part that gives these operands their gradients."""
    call = live.calls[task.call]
    op = call.op
    assert op is not None
    seconds = pricer.backward_towards(op, plan.choices[op.name], slots)
    makes = tuple(("gradient", *call.operands[slot], -1) for slot in sorted(slots))
    return replace(task, seconds=seconds, makes=makes)
