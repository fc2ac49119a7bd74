"""A page about a plan says what plan and cost model say: it adds up to the estimate, and what it holds is inert."""

import json
import random
import re
from dataclasses import asdict, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autopar.api.model_plan import ModelPlan, load_plan
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.report.page import inert_json, page_html
from autopar.report.page_data import PlanOnPage, page_data
from autopar.report.page_shards import tensor_cut
from autopar.report.page_tree import TreePart
from autopar.search.costs.pricing import make_pricer
from autopar.search.explanation.held_over_time import seconds_of_moments
from autopar.search.explanation.picture import draw
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Shard, local_ranges
from autopar.values.step_picture import Span, StepPicture, Track
from tests.report_cases import HOSTILE, flat_plan, llama, staged_plan, woven_plan


def shown(plan: ModelPlan) -> PlanOnPage:
    return drawn(plan)[0]


def drawn(plan: ModelPlan) -> tuple[PlanOnPage, StepPicture]:
    """A plan on a page, and the picture that it is drawn from."""
    pictured = plan._pictured("this", None)
    assert pictured.picture is not None
    return page_data([pictured]).plans[0], pictured.picture


def leaves(part: TreePart) -> list[TreePart]:
    return [part] if not part.parts else [leaf for below in part.parts for leaf in leaves(below)]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "megatron"])
def test_it_adds_up_to_the_estimate(name: str) -> None:
    plan = flat_plan(name)
    page, estimate = shown(plan), plan.estimate
    assert page.timeline is not None
    assert page.timeline.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert sum(span.seconds for span in page.timeline.spans) == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert page.tree.computed + page.tree.communicated == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert page.tree.nbytes == pytest.approx(estimate.peak_nbytes, rel=1e-9)
    [held] = page.held
    assert {kind: values[held.peak] for kind, values in held.kinds.items()} == pytest.approx(
        {kind: nbytes for kind, nbytes in estimate.memory.items() if nbytes or kind in held.kinds}
    )
    assert held.end == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert page.peaks[0].total == pytest.approx(estimate.peak_nbytes, rel=1e-9)
    assert not page.is_drawn_otherwise and page.missing == ()


@pytest.mark.parametrize(("name", "microbatches"), [("fsdp", 1), ("ddp", 1), ("fsdp", 2)])
def test_buckets_are_drawn_as_the_estimate_counts_them(name: str, microbatches: int) -> None:
    """But for the loss's sum and the count of labels, which are waited for as they are drawn."""
    plan = flat_plan(name, in_buckets=True, microbatches=microbatches)
    page, estimate = shown(plan), plan.estimate
    assert plan.stages[0].buckets and page.timeline is not None
    assert estimate.step_seconds * (1 - 1e-9) <= page.timeline.seconds <= estimate.in_turn_seconds * (1 + 1e-9)
    if microbatches == 1:
        assert estimate.hidden > 0
        assert page.timeline.seconds == pytest.approx(estimate.step_seconds, rel=0.02)
    rows: dict[int, list[Span]] = {}
    for span in page.timeline.spans:
        rows.setdefault(span.track, []).append(span)
    for own in rows.values():
        own.sort(key=lambda span: span.start)
        assert all(a.start + a.seconds <= b.start + 1e-12 for a, b in pairwise(own)), "one at a time"


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved-1f1b", 4)])
def test_stages_are_drawn_rank_by_rank(schedule: str, stages: int) -> None:
    plan = staged_plan(schedule, stages)
    (page, picture), estimate = drawn(plan), plan.estimate
    assert page.timeline is not None
    assert page.timeline.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert {track.rank for track in page.timeline.tracks} == {0, 1}
    assert [part.name for part in page.tree.parts] == [f"stage {n}" for n in range(stages)]
    for part, ledger in zip(page.tree.parts, picture.ledgers, strict=True):
        assert part.computed + part.communicated == pytest.approx(sum(item.amount for item in ledger.seconds))
        assert part.nbytes == pytest.approx(sum(item.amount for item in ledger.nbytes))
        assert max(below.nbytes for below in part.parts) <= part.nbytes
    assert page.tree.nbytes == pytest.approx(sum(part.nbytes for part in page.tree.parts))
    peaks = [sum(values[curve.peak] for values in curve.kinds.values()) for curve in page.held]
    assert max(peaks) == pytest.approx(estimate.peak_nbytes, rel=1e-9)
    for curve in page.held:
        assert list(curve.at) == sorted(curve.at) and curve.at[-1] <= curve.end
    assert page.sent is not None and {one.rank for one in page.sent} == {0, 1}
    assert len(page.stages) == stages


def test_two_micro_batches_at_once_are_one_tree() -> None:
    plan = woven_plan()
    page, estimate = shown(plan), plan.estimate
    assert page.timeline is not None
    assert page.timeline.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert page.tree.computed + page.tree.communicated == pytest.approx(estimate.in_turn_seconds, rel=1e-9)
    assert page.tree.nbytes == pytest.approx(estimate.peak_nbytes, rel=1e-9)
    assert len(leaves(page.tree)) == len(leaves(shown(flat_plan("fsdp", microbatches=2)).tree))


def test_moments_take_what_the_step_takes() -> None:
    plan = flat_plan("fsdp", microbatches=2)
    step_plan = plan.single
    pricer = make_pricer(mesh=plan.mesh, cluster=plan.machine, config=plan.config)
    step = lower(step_plan, make_program(llama(2)), pricer.target)
    spent = seconds_of_moments(step, pricer)
    assert len(spent) == len(Live(step).bytes["parameters"])
    once = sum(plan.estimate.seconds.values()) - spent.sum()
    assert once == pytest.approx(spent[: step.end].sum(), rel=1e-6), "the other micro-batch"


def test_layers_that_decide_alike_are_one_part() -> None:
    tree = shown(flat_plan("fsdp")).tree

    def find(part: TreePart, name: str) -> TreePart:
        return next(below for below in part.parts if below.name == name)

    [layers] = find(find(tree, "model"), "layers").parts
    assert (layers.name, layers.count) == ("0-1", 2)
    weight = find(find(find(layers, "mlp"), "up_proj"), "weight")
    assert (weight.kind, weight.count) == ("parameter", 2) and weight.cut is not None
    assert sum(leaf.nbytes for leaf in leaves(tree)) <= tree.nbytes * (1 + 1e-9)


def test_pieces_are_what_ranks_hold() -> None:
    rng = random.Random(0)
    for _ in range(60):
        mesh = make_mesh(tuple(rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3))))
        shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
        dims = [Shard(dim) for dim in range(len(shape))]
        axes = tuple(rng.choice((*dims, *dims, REPLICATE, INVARIANT, PARTIAL)) for _ in mesh.shape)
        order = [axis for axis, placement in enumerate(axes) if isinstance(placement, Shard)]
        rng.shuffle(order)
        layout = Layout(axes, tuple(order))
        cut = tensor_cut(layout, shape, mesh)
        for at in mesh.coordinates():
            held = list(local_ranges(shape, layout, mesh, at))
            for one in cut.cuts:
                piece = sum(stride * place for stride, place in zip(one.strides, at, strict=True))
                assert one.ranges[piece] == held[one.dim]
                held[one.dim] = (0, shape[one.dim])
            assert held == [(0, size) for size in shape], "what is not cut is whole"


def test_short_neighbours_are_drawn_as_one() -> None:
    tracks = [Track(rank=0, lane="compute", is_device=True)]
    spans = [Span(track=0, start=float(i), seconds=1.0, name=f"op {i}", action="FB"[i >= 500]) for i in range(1000)]
    drawn = draw(1000.0, tracks, spans, most=100)
    assert len(drawn.spans) <= 100 and drawn.joined_below > 1
    assert sum(span.tasks for span in drawn.spans) == 1000
    assert sum(span.seconds for span in drawn.spans) == pytest.approx(1000)
    assert all(span.name.startswith("op ") for span in drawn.spans)
    assert draw(1000.0, tracks, spans, most=1000).joined_below == 0


def read(page: str) -> dict[str, Any]:
    """The data of a page, as a browser reads it: to the first end of its element."""
    [text, *_] = re.split("</script", page.partition('id="data">')[2], flags=re.IGNORECASE)
    body: dict[str, Any] = json.loads(text)
    return body


def test_texts_of_files_are_data() -> None:
    plan = flat_plan("fsdp")
    data = page_data([plan._pictured(HOSTILE, None)])
    tree = replace(data.plans[0].tree, name=HOSTILE, how=HOSTILE)
    data = replace(data, plans=(replace(data.plans[0], model=HOSTILE, tree=tree, baselines={HOSTILE: HOSTILE}),))
    page = page_html(data)
    assert read(page)["plans"][0]["baselines"] == {HOSTILE: HOSTILE}
    assert read(page)["plans"][0]["tree"]["how"] == HOSTILE
    assert page.count("<script") == 3 and "<script>window" not in page and "<img src=x" not in page
    for text in ("]]>", "<!--", "\u2029", "\\", '"'):
        assert json.loads(inert_json({text: [text]})) == {text: [text]}
        assert not set("<>&\u2028\u2029") & set(inert_json(text))


def test_it_asks_for_nothing() -> None:
    page = page_html(page_data([flat_plan("fsdp")._pictured("this", None)]))
    assert "default-src 'none'" in page
    own = page.replace((resources.files("autopar.report") / "web" / "echarts.min.js").read_text(), "")
    assert re.findall(r"\ssrc=|<link[^>]*\shref=\"(?!data:,)|@import|url\(|fetch\(|https?:", own) == []
    assert len(page) < 2e6


def test_of_a_file_alone_it_shows_what_the_file_says(tmp_path: Path) -> None:
    flat, staged = flat_plan("fsdp"), staged_plan()
    for plan, name in ((flat, "flat"), (staged, "staged")):
        plan.save(tmp_path / f"{name}.json")
        load_plan(tmp_path / f"{name}.json").report(tmp_path / f"{name}.html")
        [page] = read((tmp_path / f"{name}.html").read_text())["plans"]
        assert page["timeline"] is None and page["held"] == [] and page["sent"] is None
        assert any("--trust" in said for said in page["missing"])
        assert page["nbytes"] == pytest.approx(asdict(plan.estimate)["memory"], rel=1e-5)
    assert read((tmp_path / "flat.html").read_text())["plans"][0]["tree"]["parts"][0]["cut"] is not None
    with pytest.raises(ArgumentError, match=r"cannot be written.*folder that exists"):
        flat.report(tmp_path / "none" / "r.html")


def test_another_plan_stands_beside(tmp_path: Path) -> None:
    flat_plan("fsdp").report(tmp_path / "r.html", beside=flat_plan("ddp"), names=("a.json", "b.json"))
    body = read((tmp_path / "r.html").read_text())
    assert [plan["name"] for plan in body["plans"]] == ["a.json", "b.json"]
    assert body["difference"]["changes"]
    graph = replace(llama(), parameters=llama().parameters[1:])
    other = replace(flat_plan("ddp"), captured=graph, fingerprint=graph.fingerprint)
    with pytest.raises(PlanMismatchError, match="different models"):
        flat_plan("fsdp").report(tmp_path / "r.html", beside=other)
