"""Contest files: read as the format means them, refused where they do not hold together, evaluated in integers."""

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import ContestFileError
from autopar.search.pairwise import contest
from autopar.search.pairwise.problem import Pairwise, evaluate, fits, usage
from autopar.search.pairwise.reduce.pipeline import reduce
from tests.pairwise_graphs import every_choice, random_pairwise

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "iopddl"

RAW: dict[str, Any] = {
    "name": "small",
    "nodes": {
        "intervals": [[0, 4], [2, 6], [3, 3]],
        "costs": [[1, 2], [10, 20, 30], [0, 10**18]],
        "usages": [[5, 7], [1, 2, 3], [100, 100]],
    },
    "edges": {
        "nodes": [[0, 1], [1, 0], [2, 2], [1, 2]],
        "costs": [[1, 2, 3, 4, 5, 6], [10, 40, 20, 50, 30, 60], [7, 0, 0, 9], [0, 0, 0, 0, 0, 10**17]],
    },
    "usage_limit": 9,
}


def test_a_file_is_read_as_the_format_means_it(tmp_path: Path) -> None:
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"problem": RAW}).encode()))
    raw = contest.read(path)
    assert raw["name"] == "small"
    problem = contest.load(path)
    assert problem.limit == 9
    # Both edges between 0 and 1 added, the second turned round; node 2's edge to itself in its costs.
    assert list(zip(problem.edge_a, problem.edge_b, strict=True)) == [(0, 1), (1, 2)]
    assert problem.pair_cost[:6].tolist() == [11, 22, 33, 44, 55, 66]
    assert problem.pair_cost[6:].tolist() == [0, 0, 0, 0, 0, np.inf]
    assert problem.cost.tolist() == [1, 2, 10, 20, 30, 7, np.inf]
    # Node 2 is never live; 0 and 1 both are from 2 to 4, the one time that can be the worst.
    assert problem.member_node.tolist() == [0, 1]
    assert problem.num_times == 1
    choice = np.array([1, 2, 0])
    assert contest.evaluate_integers(path, choice) == (2 + 30 + 0 + 6 + 60 + 7, 10)
    assert evaluate(problem, choice) == 105 and not fits(problem, choice)


def test_integers_beyond_64_bits_are_exact() -> None:
    raw = copy.deepcopy(RAW)
    raw["nodes"]["costs"][0] = [2**70 + 1, 9007199254740993]
    raw["nodes"]["usages"][0] = [2**66 + 1, 5]
    assert contest.evaluate_integers(raw, [0, 0, 0]) == (2**70 + 1 + 10 + 1 + 10 + 7, 2**66 + 2)
    assert contest.evaluate_integers(raw, [1, 0, 0])[0] == 9007199254740993 + 10 + 4 + 40 + 7


def test_an_absent_limit_is_none() -> None:
    raw = {key: value for key, value in RAW.items() if key != "usage_limit"}
    assert contest.parse(raw).limit == np.inf


def set_at(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        value: Any = raw
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing nodes": (lambda raw: raw.pop("nodes"), '"nodes", "costs"'),
    "missing usages": (lambda raw: raw["nodes"].pop("usages"), '"nodes", "usages"'),
    "missing edges": (lambda raw: raw.pop("edges"), '"edges", "costs"'),
    "a usage too few": (set_at("nodes", "usages", 1, to=[1, 2]), "node 1 has not one usage an option"),
    "a node too few": (lambda raw: raw["nodes"]["usages"].pop(), "3 nodes have costs but 2 have usages"),
    "an interval too few": (lambda raw: raw["nodes"]["intervals"].pop(), "3 nodes have costs but 2 have an entry"),
    "an interval of three": (
        set_at("nodes", "intervals", 2, to=[1, 2, 3]),
        "node 2: its interval must be two",
    ),
    "negative usage": (set_at("nodes", "usages", 1, to=[1, -2, 3]), "node 1 has a negative usage"),
    "no option": (set_at("nodes", "costs", 2, to=[]), "node 2 has not one usage"),
    "a node out of range": (set_at("edges", "nodes", 3, to=[1, 3]), "edge 3 names a node outside 0 to 2"),
    "a negative node": (set_at("edges", "nodes", 0, to=[-1, 1]), "edge 0 names a node outside 0 to 2"),
    "a pair cost too few": (set_at("edges", "costs", 1, to=[1, 2]), "edge 1 has not one cost a pair of options"),
    "an edge too few": (lambda raw: raw["edges"]["nodes"].pop(), "4 edges have costs but 3"),
    "a cost that is text": (set_at("nodes", "costs", 1, to=[1, "two", 3]), "node 1: costs must be a list of numbers"),
    "a cost that is null": (set_at("edges", "costs", 2, to=[1, None, 3, 4]), "edge 2: costs must be numbers, not None"),
    "costs that are no list": (set_at("nodes", "costs", 0, to=3), "node 0: costs must be a list of numbers"),
    "a cost that is no number": (
        set_at("nodes", "costs", 0, to=[float("nan"), 1]),
        "costs must be numbers, not nan",
    ),
    "a negative limit": (set_at("usage_limit", to=-1), "usage_limit is -1"),
    "a limit that is text": (set_at("usage_limit", to="much"), "usage_limit is 'much'"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_does_not_hold_together_is_refused_by_name(fault: str) -> None:
    raw = copy.deepcopy(RAW)
    change, said = BROKEN[fault]
    change(raw)
    with pytest.raises(ContestFileError) as error:
        contest.parse(raw)
    assert said in str(error.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"problem": []}'])
@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_what_is_no_contest_file_is_refused(tmp_path: Path, data: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ContestFileError, match=r"graph\.json"):
        contest.load(path)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
        with pytest.raises(ContestFileError, match=r"graph\.json"):
            contest.load(path)


@pytest.mark.parametrize("choice", [[0, 0], [0, 0, 0, 0], [0, 3, 0], [-1, 0, 0]])
def test_a_choice_of_another_graph_is_refused(choice: list[int]) -> None:
    with pytest.raises(ContestFileError, match="one option of every node"):
        contest.evaluate_integers(RAW, choice)


def test_a_written_graph_reads_the_same(tmp_path: Path) -> None:
    """Cost, peak and limit; members beyond the first and the base are nodes of their own, at the end."""
    for seed in range(150):
        problem = random_pairwise(seed)
        path = tmp_path / ("graph.json.gz" if seed % 2 else "graph.json")
        contest.dump(problem, path, name=str(seed))
        raw = contest.read(path)
        again = contest.parse(raw)
        assert raw["name"] == str(seed) and again.limit == problem.limit
        choices, costs, peaks = every_choice(problem)
        for row in np.random.default_rng(seed).permutation(len(choices))[:5]:
            choice = with_ties(problem, choices[row], again.num_nodes)
            assert evaluate(again, choice) == costs[row]
            assert usage(again, choice).max(initial=0.0) == peaks[row]
            if costs[row] < np.inf:
                assert contest.evaluate_integers(raw, choice) == (costs[row], peaks[row])


def with_ties(problem: Pairwise, choice: np.ndarray[Any, Any], num_nodes: int) -> np.ndarray[Any, Any]:
    """Of the written graph: further members choose as their node does, the base has one option."""
    owners = problem.member_node.tolist()
    further = [choice[owner] for m, owner in enumerate(owners) if owner in owners[:m]]
    full = np.concatenate([choice, np.array(further, np.int64)])
    return np.concatenate([full, np.zeros(num_nodes - len(full), np.int64)])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the contest's graphs are not here")
def test_on_a_contest_graph_reduced_choices_certify_in_integers() -> None:
    raw = contest.read(SHARED / "B.json.gz")
    problem = contest.parse(raw)
    assert (problem.num_nodes, problem.num_edges) == (816, 1_091)
    reduced = reduce(problem)
    assert reduced.problem.num_nodes < 223
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = (rng.random(reduced.problem.num_nodes) * reduced.problem.num_options()).astype(np.int64)
        lifted = reduced.lift(choice)
        cost, peak = contest.evaluate_integers(raw, lifted)
        expected = evaluate(reduced.problem, choice) + reduced.offset
        if expected < np.inf:
            assert cost == expected
        assert (peak <= problem.limit) == fits(reduced.problem, choice)
        assert peak == usage(problem, lifted).max()
