"""What is said of a search is saved with the plan, field by field."""

import json
from dataclasses import asdict, fields

from autopar.errors import PlanFileError
from autopar.values.schema import checked
from autopar.values.search_report import (
    LeastInTurn,
    RankedPlan,
    Recomputed,
    SearchReport,
    SolvedGraph,
    SpaceSearched,
    StageCost,
    TimelineRanking,
)


def test_a_report_is_read_as_it_was_saved() -> None:
    report = SearchReport(
        solved=SolvedGraph(method="ilp", status="optimal", nodes=3, options=9, arcs=4, build_seconds=0.5),
        memory_limit=8e10,
        searched_seconds=1.5,
        folded_seconds=1.75,
        whole_seconds={"aten.sort": 0.25},
        recompute=Recomputed(seconds=0.125, nbytes=1e9),
        is_in_buckets=True,
        in_buckets={"the search": 1.5},
        is_rough=True,
        space=SpaceSearched(
            space="meshes",
            status="proved",
            candidates=4,
            planned=2,
            do_not_fit=1,
            seconds=3.0,
            near={"2x4": 1.6},
            not_below={"8": 1.7},
            in_turn=LeastInTurn(plan="8", in_turn_seconds=1.4, step_seconds=1.6),
        ),
        microbatches={"1": 1.5, "2": "does not fit"},
        one_microbatch="a batch norm",
        copies={"2, two at once": 1.5},
        timeline=TimelineRanking(
            bucket_nbytes=2.5e7,
            ahead=2,
            chosen=0,
            plans=(RankedPlan(plan="first by the sum", sum_seconds=1.5, timeline_seconds=1.25),),
            left_out={"4": "no time was left"},
        ),
        stages=(StageCost(seconds=0.5, once=0.25, nbytes=1e9), StageCost(seconds=0.75, once=0.0, nbytes=2e9)),
        instead="mesh 8",
    )
    assert all(getattr(report, one.name) != getattr(SearchReport(), one.name) for one in fields(report))
    for given in (report, SearchReport()):
        assert checked(SearchReport, json.loads(json.dumps(asdict(given))), "", PlanFileError, "") == given
