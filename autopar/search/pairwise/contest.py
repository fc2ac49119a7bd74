"""How strategy graphs travel as files: the IOPDDL contest's (github.com/google/iopddl), read, written, certified.

A file, gzipped where its name ends in .gz, holds
`{"problem": {"name", "nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"}, "usage_limit"}}`.
Read into `Pairwise`:

- A cost of 1e17 and above is inf: not allowed. Below 9e15 costs are exact in float64; between the two they are kept to
  a relative 1e-16, and `evaluate_integers` is the judge.
- Edges between the same two nodes, either way round, are added; an edge from a node to itself joins its node's costs.
- A half-open interval that is empty carries no usage. Usage is constant between the ends of intervals, and only times
  that some interval begins at and some interval ends after, before another begins, can be the worst: only these stay.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ContestFileError
from autopar.search.pairwise.problem import Floats, Ints, Pairwise
from autopar.values.whole_file import write_whole

NOT_ALLOWED = 10**17
WRITTEN_FOR_INF = 10**18

Raw = Mapping[str, Any]


def load(path: str | Path) -> Pairwise:
    """The graph of a file; its nodes and options keep their numbers."""
    return parse(read(path))


def read(path: str | Path) -> dict[str, Any]:
    """What stands under "problem", as it stands: `raw["name"]`, and what `evaluate_integers` judges by."""
    path = Path(path)
    data = path.read_bytes()
    try:
        value = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, EOFError, OSError) as error:
        raise ContestFileError(f"{path.name} is not {'gzipped ' * (path.suffix == '.gz')}JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("problem"), dict):
        raise ContestFileError(f'{path.name} has no object under "problem" at its top; is it a contest file?')
    return dict(value["problem"])


def parse(raw: Raw) -> Pairwise:
    """The graph of what stands under "problem"."""
    first_option, cost = _ragged(_field(raw, "nodes", "costs"), "node", "costs")
    first_usage, usage = _ragged(_field(raw, "nodes", "usages"), "node", "usages")
    num_nodes, num_options = len(first_option) - 1, np.diff(first_option)
    intervals = _pairs(_field(raw, "nodes", "intervals"), num_nodes, "node", "interval")
    if len(first_usage) != len(first_option):
        raise ContestFileError(f"{num_nodes} nodes have costs but {len(first_usage) - 1} have usages")
    _refuse(np.diff(first_usage) != num_options, "node", "has not one usage an option")
    _refuse(num_options == 0, "node", "has no option")
    _refuse(np.logical_or.reduceat(usage < 0, first_option[:-1]), "node", "has a negative usage")

    first_pair, pair_cost = _ragged(_field(raw, "edges", "costs"), "edge", "costs")
    ends = _pairs(_field(raw, "edges", "nodes"), len(first_pair) - 1, "edge", "pair of nodes")
    _refuse(np.any((ends < 0) | (ends >= num_nodes), axis=1), "edge", f"names a node outside 0 to {num_nodes - 1}")
    _refuse(np.diff(first_pair) != num_options[ends].prod(1), "edge", "has not one cost a pair of options")

    limit = raw.get("usage_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0):
        raise ContestFileError(f"usage_limit is {limit!r}; give bytes, 0 or more, or leave it out")
    cost[cost >= NOT_ALLOWED] = np.inf
    pair_cost[pair_cost >= NOT_ALLOWED] = np.inf
    cost, ends, first_pair, pair_cost = _simple_edges(first_option, cost, ends, first_pair, pair_cost)
    live = np.flatnonzero(intervals[:, 0] < intervals[:, 1])
    begin, end, num_times = compress_times(intervals[live, 0], intervals[live, 1])
    return Pairwise(
        first_option=first_option,
        cost=cost,
        edge_a=np.ascontiguousarray(ends[:, 0]),
        edge_b=np.ascontiguousarray(ends[:, 1]),
        first_pair=first_pair,
        pair_cost=pair_cost,
        member_node=live,
        begin=begin,
        end=end,
        first_usage=np.concatenate([[0], np.cumsum(num_options[live])]).astype(np.int64),
        usage=usage[np.repeat(np.isin(np.arange(num_nodes), live, assume_unique=True), num_options)],
        base=np.zeros(num_times),
        limit=np.inf if limit is None else float(limit),
    )


def compress_times(begin: Ints, end: Ints) -> tuple[Ints, Ints, int]:
    """Intervals over the times that can be the worst, and how many these are, where nothing else varies with time.

    Going right, the live set only grows while intervals begin and only shrinks while they end: its maxima are the
    beginnings that are followed by an end.
    """
    points = np.unique(np.concatenate([begin, end]))
    starts = np.isin(points, begin)
    worst = points[:-1][starts[:-1] & np.isin(points[1:], end)] if len(points) else points
    return np.searchsorted(worst, begin), np.searchsorted(worst, end), len(worst)


def evaluate_integers(source: str | Path | Raw, choice: Sequence[int] | Ints) -> tuple[int, int]:
    """Cost and peak bytes of one option a node on the file as it stands, in integers of any size.

    Shares nothing with `parse`: it is what a claimed cost is held against.
    """
    raw = read(source) if isinstance(source, str | Path) else source
    nodes, edges = raw["nodes"], raw["edges"]
    chosen = [int(option) for option in choice]
    if len(chosen) != len(nodes["costs"]) or any(
        not 0 <= option < len(costs) for option, costs in zip(chosen, nodes["costs"], strict=True)
    ):
        raise ContestFileError("a choice must name one option of every node")
    cost = sum(int(costs[option]) for option, costs in zip(chosen, nodes["costs"], strict=True))
    for (a, b), costs in zip(edges["nodes"], edges["costs"], strict=True):
        cost += int(costs[chosen[a] * len(nodes["costs"][b]) + chosen[b]])
    change: dict[int, int] = {}
    for option, usages, (begin, end) in zip(chosen, nodes["usages"], nodes["intervals"], strict=True):
        if begin < end:
            change[begin] = change.get(begin, 0) + int(usages[option])
            change[end] = change.get(end, 0) - int(usages[option])
    taken = peak = 0
    for time in sorted(change):
        taken += change[time]
        peak = max(peak, taken)
    return cost, peak


def dump(problem: Pairwise, path: str | Path, *, name: str = "autopar") -> None:
    """Write a graph as a contest file, gzipped where the name ends in .gz.

    The format gives a node one interval and knows no base. A node's further members become nodes tied to it by an edge
    that allows equal options only, and stretches of equal base nodes of one option; both come after the graph's nodes.
    """
    first, num_options = problem.first_option, problem.num_options()
    costs = [_numbers(problem.cost[first[i] : first[i + 1]]) for i in range(problem.num_nodes)]
    usages = [_numbers(np.zeros(count)) for count in num_options]
    intervals = [[0, 0] for _ in costs]
    ends = np.stack([problem.edge_a, problem.edge_b], 1).tolist()
    pairs = [
        _numbers(problem.pair_cost[begin:end])
        for begin, end in zip(problem.first_pair[:-1], problem.first_pair[1:], strict=True)
    ]
    for m, node in enumerate(problem.member_node.tolist()):
        taken = _numbers(problem.usage[problem.first_usage[m] : problem.first_usage[m + 1]])
        interval = [int(problem.begin[m]), int(problem.end[m])]
        if intervals[node] == [0, 0]:
            usages[node], intervals[node] = taken, interval
            continue
        ends.append([node, len(costs)])
        pairs.append(_numbers(np.where(np.eye(len(taken), dtype=bool), 0, np.inf).ravel()))
        costs.append(_numbers(np.zeros(len(taken))))
        usages.append(taken)
        intervals.append(interval)
    steps = np.flatnonzero(np.diff(problem.base, prepend=0.0, append=0.0)).tolist()
    for begin, end in pairwise(steps):
        if problem.base[begin]:
            costs.append(_numbers(np.zeros(1)))
            usages.append(_numbers(problem.base[begin : begin + 1]))
            intervals.append([begin, end])
    value: dict[str, Any] = {
        "name": name,
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": ends, "costs": pairs},
    }
    if np.isfinite(problem.limit):
        value["usage_limit"] = _numbers(np.array([problem.limit]))[0]
    data = json.dumps({"problem": value}, allow_nan=False, separators=(",", ":")).encode()
    write_whole(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def _numbers(values: Floats) -> list[int | float]:
    """As JSON has them: integers where they are, and what the format takes for inf."""
    finite: list[float] = np.where(np.isinf(values), WRITTEN_FOR_INF, values).tolist()
    return [int(value) if value.is_integer() else value for value in finite]


def _simple_edges(
    first_option: Ints, cost: Floats, ends: Ints, first_pair: Ints, pair_cost: Floats
) -> tuple[Floats, Ints, Ints, Floats]:
    """At most one edge a pair of nodes, none from a node to itself; node costs with the latter in."""
    num_options = np.diff(first_option)
    for edge in np.flatnonzero(ends[:, 0] == ends[:, 1]).tolist():
        node = ends[edge, 0]
        diagonal = pair_cost[first_pair[edge] : first_pair[edge + 1]][:: num_options[node] + 1]
        cost[first_option[node] : first_option[node + 1]] += diagonal
    key = ends.min(1) * len(num_options) + ends.max(1)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    kept = first[group]
    for edge in np.flatnonzero(kept != np.arange(len(ends))).tolist():
        target = kept[edge]
        added = pair_cost[first_pair[edge] : first_pair[edge + 1]]
        if ends[edge, 0] != ends[target, 0]:
            added = added.reshape(num_options[ends[edge]]).T.ravel()
        pair_cost[first_pair[target] : first_pair[target + 1]] += added
    stays = (kept == np.arange(len(ends))) & (ends[:, 0] != ends[:, 1])
    sizes = np.diff(first_pair)
    if not stays.all():
        pair_cost = pair_cost[np.repeat(stays, sizes)]
    return cost, ends[stays], np.concatenate([[0], np.cumsum(sizes[stays])]).astype(np.int64), pair_cost


def _field(raw: Raw, outer: str, inner: str) -> list[Any]:
    value = raw.get(outer)
    value = value.get(inner) if isinstance(value, dict) else None
    if not isinstance(value, list):
        raise ContestFileError(f'the problem has no list under "{outer}", "{inner}"')
    return value


def _ragged(lists: list[Any], thing: str, field: str) -> tuple[Ints, Floats]:
    """Where each list begins in all of them put together."""
    try:
        first = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=first[1:])
        values = np.fromiter(chain.from_iterable(lists), np.float64, int(first[-1]))
    except (TypeError, ValueError, OverflowError):
        wrong = next((i for i, entry in enumerate(lists) if not _is_numbers(entry)), None)
        raise ContestFileError(f"{thing} {wrong}: {field} must be a list of numbers") from None
    bad = np.flatnonzero(np.isnan(values) | (values == -np.inf))
    if len(bad):
        wrong = int(np.searchsorted(first, bad[0], "right")) - 1
        raise ContestFileError(f"{thing} {wrong}: {field} must be numbers, not {lists[wrong][bad[0] - first[wrong]]}")
    return first, values


def _is_numbers(entry: Any) -> bool:
    if not isinstance(entry, list):
        return False
    return all(isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**300) for value in entry)


def _pairs(lists: list[Any], count: int, thing: str, field: str) -> NDArray[np.int64]:
    if len(lists) != count:
        raise ContestFileError(f"{count} {thing}s have costs but {len(lists)} have an entry for their {field}")
    for i, entry in enumerate(lists):
        if not (
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int) and isinstance(entry[1], int)
        ):
            raise ContestFileError(f"{thing} {i}: its {field} must be two integers, not {entry!r}")
    return np.array(lists, np.int64).reshape(count, 2)


def _refuse(wrong: NDArray[np.bool_], thing: str, what: str) -> None:
    if wrong.any():
        raise ContestFileError(f"{thing} {int(np.argmax(wrong))} {what}")
