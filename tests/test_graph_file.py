"""A strategy graph survives its file; without groups its flat form and the contest's file mean the same."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import ContestFileError
from autopar.search.graph.strategy_graph import Memory, StrategyGraph, evaluate, usage
from autopar.search.graph_file import dump, load
from autopar.search.pairwise import problem as flat
from autopar.search.pairwise.convert import flatten
from autopar.search.pairwise.problem import Pairwise
from tests.strategy_graphs import random_graph


def graphs(num: int, *, with_groups: bool) -> list[StrategyGraph]:
    found = [graph for seed in range(4 * num) if bool((graph := random_graph(seed)).groups) == with_groups]
    assert len(found) >= num // 2
    return found[:num]


def without_groups(graph: StrategyGraph) -> StrategyGraph:
    memory = graph.memory
    kept = None if memory is None else Memory(limit=memory.limit, base=memory.base, nodes=memory.nodes)
    return replace(graph, groups=(), memory=kept)


def choices(graph: StrategyGraph, num: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.array([rng.integers(len(node.seconds)) for node in graph.nodes]) for _ in range(num)]


def test_a_graph_with_groups_reads_back_as_it_was(tmp_path: Path) -> None:
    for i, graph in enumerate(graphs(40, with_groups=True)):
        path = tmp_path / f"{i}.json.gz"
        dump(graph, path)
        again = load(path)
        assert isinstance(again, StrategyGraph)
        dump(again, second := tmp_path / f"{i} again.json.gz")
        assert second.read_bytes() == path.read_bytes()
        for choice in choices(graph, 3):
            arcs = tuple(np.arange(len(group.arc_source)) for group in graph.groups)
            assert evaluate(again, choice, arcs) == evaluate(graph, choice, arcs)
            assert (usage(again, choice, arcs) == usage(graph, choice, arcs)).all()


def test_without_groups_the_flat_form_and_the_contest_file_mean_the_same(tmp_path: Path) -> None:
    num_with_memory = 0
    for i, graph in enumerate(map(without_groups, graphs(60, with_groups=True) + graphs(20, with_groups=False))):
        dump(graph, tmp_path / f"{i}.json")
        read = load(tmp_path / f"{i}.json")
        assert isinstance(read, Pairwise)
        num_with_memory += graph.memory is not None
        for choice in choices(graph, 5):
            problem = flatten(graph)
            assert flat.evaluate(problem, choice) == pytest.approx(evaluate(graph, choice, ()), rel=1e-12)
            if graph.memory is not None:
                assert flat.usage(problem, choice) == pytest.approx(usage(graph, choice, ()), rel=1e-12)
                assert flat.fits(problem, choice) == (usage(graph, choice, ()).max() <= graph.memory.limit)
            assert read.num_nodes >= problem.num_nodes
            assert (read.first_option[: problem.num_nodes + 1] == problem.first_option).all()
    assert num_with_memory > 20


def test_a_graph_with_groups_has_no_flat_form() -> None:
    (graph,) = graphs(1, with_groups=True)
    with pytest.raises(ValueError, match="redistribution groups"):
        flatten(graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.pop("nodes"), "strategy_graph lacks nodes"),
        (lambda graph: graph.update(version=99), "version 99"),
        (lambda graph: graph["groups"][0].update(gives=["x"]), r"strategy_graph.groups\[0\].gives must be numbers"),
        (lambda graph: graph["groups"][0].update(producer=1.5), r"groups\[0\].producer must be int, not 1.5"),
        (lambda graph: graph["nodes"].append(3), "must be an object, not int"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, change: object, message: str) -> None:
    (graph,) = graphs(1, with_groups=True)
    dump(graph, path := tmp_path / "graph.json")
    value = json.loads(path.read_text())
    change(value["strategy_graph"])  # type: ignore[operator]
    path.write_text(json.dumps(value))
    with pytest.raises(ContestFileError, match=message):
        load(path)


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "{", '{"problem": 3}'])
def test_what_is_no_graph_is_an_error(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "graph.json").write_text(text)
    with pytest.raises(ContestFileError, match=r"graph.json (is not JSON|has neither)"):
        load(path)
