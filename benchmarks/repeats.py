"""How far is a source from itself? The error that no model of its columns can stay below.

Repeats: rows of a source with the same model, layout and machine, but other seconds. A prediction is one figure for all
of them; the best one, their median, is off by `deviation` on average. Where a source names a change of its machine or
software, `within a stack` compares what lies on one side of it.

Batches: pairs of rows that differ in the number of micro-batches only. m of them take m + (p - 1) / v times as long as
one in a pipeline of p stages, v a rank, and what is done once a step makes the seconds a micro-batch no less for fewer.
`batch_ratio` is how far the pair that is farthest apart is from that, whatever a micro-batch takes.

Contradictions: pairs of rows that differ in the attention kernel only, in which version 2 of flash attention takes
longer than version 1. It does less (Dao 2023, arXiv:2307.08691), so no formula of the work gives such an order.
"""

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.reference_rows import Case


def repeat_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One row a source that has repeats or contradictions."""
    rows = []
    for source in dict.fromkeys(case.source for case in cases):
        own = [case for case in cases if case.source == source and case.seconds is not None]
        whole = _groups([(_layout(case), case) for case in own])
        within = _groups([((case.stack, _layout(case)), case) for case in own])
        pairs, slower = _kernel_pairs(own)
        batches = _batch_ratios(own)
        if whole or slower or batches:
            spread = [max(group) / min(group) for group in whole]
            rows.append(
                {
                    "source": source, "layouts": len(whole), "runs": sum(map(len, whole)),
                    "deviation": _deviation(whole), "within_a_stack": _deviation(within),
                    "largest_ratio": max(spread, default=1.0),
                    "batches": len(batches), "batch_ratio": max(batches, default=1.0),
                    "contradictions": len(slower), "of_pairs": pairs, "worst": max(slower, default=1.0),
                }
            )  # fmt: skip
    return rows


def _layout(case: Case) -> Hashable:
    # one tensor parallel rank splits no sequence
    config = replace(case.config, sequence_parallel=case.config.sequence_parallel and case.config.tp > 1)
    return case.shape, config, case.choices, case.cluster


def _groups(keyed: Sequence[tuple[Hashable, Case]]) -> list[list[float]]:
    """Seconds of each layout that ran at least twice; the same figure in two tables is one run."""
    by_key: dict[Hashable, set[float]] = {}
    for key, case in keyed:
        by_key.setdefault(key, set()).add(float(case.seconds or 0.0))
    return [sorted(found) for found in by_key.values() if len(found) > 1]


def _deviation(groups: Sequence[Sequence[float]]) -> float:
    """Mean of |seconds / median - 1| over all runs."""
    return statistics.mean([abs(s / statistics.median(group) - 1) for group in groups for s in group] or [0.0])


def _batch_ratios(cases: Sequence[Case]) -> list[float]:
    """Of each pair of 1F1B runs of one layout and stack with different numbers of micro-batches, the ratio of seconds a
    micro-batch, at least 1."""
    by_key: dict[Hashable, dict[int, list[float]]] = {}
    for case in cases:
        config, m = case.config, case.config.num_microbatches
        if config.schedule == "1f1b" and not case.choices:
            key = (case.shape, replace(config, global_batch=config.dp * config.micro_batch), case.cluster, case.stack)
            each = float(case.seconds or 0.0) / (m + (config.pp - 1) / config.virtual_stages)
            by_key.setdefault(key, {}).setdefault(m, []).append(each)
    layouts = [[statistics.median(found) for found in by_count.values()] for by_count in by_key.values()]
    return [max(a, b) / min(a, b) for layout in layouts for a, b in combinations(layout, 2)]


def _kernel_pairs(cases: Sequence[Case]) -> tuple[int, list[float]]:
    """How many layouts ran with both versions, and the ratios of those in which version 2 was slower."""
    times: dict[Hashable, dict[str, float]] = {}
    for case in cases:
        if case.config.attention in ("flash", "flash1") and case.config.fusion == "none":
            key = (case.shape, replace(case.config, attention="flash"), case.cluster)
            times.setdefault(key, {})[case.config.attention] = float(case.seconds or 0.0)
    ratios = [both["flash"] / both["flash1"] for both in times.values() if len(both) == 2]
    return len(ratios), [ratio for ratio in ratios if ratio > 1]
