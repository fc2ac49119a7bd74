"""Why is a plan in stages as it is? What each stage takes and holds, what the pipeline idles, what binds, what is near.

The step of a pipeline is taken apart by simulating its order again, each line what it adds to those before:

    work                 what the ranks work, shared out evenly over them
    fill and drain       of the schedule, if all stages were equal and messages took no time
    uneven stages        stages as they are
    messages             between stages
    once a step          of the slowest rank

They add up to the step. What a change would buy is found by planning again with the same mesh, pipeline ranks,
schedule and micro-batches; bounds are those of that search. Other schedules are priced with the same stages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.collectives import cheapest
from autopar.cost_models.links import axis_links
from autopar.cost_models.pipeline import make_pipeline
from autopar.cost_models.schedules import PipelineOrder, make_order
from autopar.cost_models.timeline import simulate
from autopar.errors import ArgumentError, InfeasibleError, SearchTimeoutError
from autopar.lower.program import make_program
from autopar.passes.split_stages import split_stages
from autopar.search.costs.ledger import ledger
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.ilp import CutoffError
from autopar.search.explanation.pin_costs import lifted_pins
from autopar.search.explanation.questions import TimedQuestions, changes
from autopar.search.joint.candidates import SEARCHED, Candidate
from autopar.search.joint.joint import Joint
from autopar.search.joint.questions import Setup
from autopar.search.known.baselines import BASELINES, memory_limit
from autopar.search.known.named_configuration import parse_configuration
from autopar.search.known.staged_baselines import staged_baseline
from autopar.search.meshes import Arrangement
from autopar.search.pipeline_parts import part_of
from autopar.search.search_options import SearchOptions
from autopar.search.staged.stages import StagePrice, in_flight, price_stage, priced, stage_work
from autopar.search.timeline.staged_buckets import in_buckets
from autopar.values.blocks import blocks_text
from autopar.values.cluster import Cluster
from autopar.values.explanation import Alternative, Explanation, Item, Ledger, Offer, StageFacts
from autopar.values.graph import CapturedModel, requires_grad
from autopar.values.plan import Plan
from autopar.values.schedules import SCHEDULES, SPLITTING, stage_ranks
from autopar.values.train_config import TrainConfig


def explain_stages(
    plan: Plan, captured: CapturedModel, cluster: Cluster, asked: TimedQuestions, relative_gap: float
) -> Explanation:
    """The explanation of a plan of several stages."""
    asker = _Asker(plan=plan, captured=captured, cluster=cluster, questions=asked, relative_gap=relative_gap)
    return asker.run()


def step_parts(plan: Plan, prices: Sequence[StagePrice]) -> dict[str, float]:
    """Of the estimated step: work, fill and drain, uneven stages, messages, once a step."""
    order = make_order(plan.schedule, plan.pipeline, plan.microbatches, plan.num_stages // plan.pipeline)
    even = StagePrice(
        forward=sum(p.forward for p in prices) / len(prices),
        backward=sum(p.backward for p in prices) / len(prices),
        once=0.0,
        weights=None if prices[0].weights is None else sum(p.weights or 0.0 for p in prices) / len(prices),
    )
    work = plan.microbatches * sum(p.passing for p in prices) / plan.pipeline
    equal = _makespan(order, [even] * len(prices))
    silent = _makespan(order, [replace(p, sent=0.0) for p in prices])
    whole = _makespan(order, prices)
    return {
        "work, shared out evenly": work,
        "fill and drain of the schedule": equal - work,
        "uneven stages": silent - equal,
        "messages between stages": whole - silent,
        "once a step": plan.estimate.step_seconds - whole,
    }


def _makespan(order: PipelineOrder, prices: Sequence[StagePrice]) -> float:
    return float(simulate(make_pipeline(order, [stage_work(p) for p in prices]).tasks).finish.max(initial=0.0))


@dataclass(slots=True, kw_only=True)
class _Asker:
    plan: Plan
    captured: CapturedModel
    cluster: Cluster
    questions: TimedQuestions
    relative_gap: float

    def run(self) -> Explanation:
        given, cluster = self.plan, self.cluster
        part, parts = part_of(cluster, given.pipeline), split_stages(self.captured, given.cuts)
        limit = memory_limit(cluster, given.config)
        self.questions.tell("pricing the stages")
        plan = self.plan = priced(given, parts, cluster, part)
        prices = self._prices(parts, part)
        slowest = max(range(plan.num_stages), key=lambda s: prices[s].passing)
        after = plan.stages[slowest + 1].layouts if slowest + 1 < plan.num_stages else {}
        own = make_pricer(mesh=plan.mesh, cluster=part, config=plan.config)
        sent = {name: after[name] for name in parts[slowest].sends}
        space = plan.estimate.search.space
        offers = [
            self._offer(change, machine, room, parts)
            for change, machine, room in changes(cluster, limit)
            if room > 0 and self.questions.asks(change)
        ]
        return Explanation(
            plan=plan,
            limit=limit,
            parts=step_parts(plan, prices),
            stages=self._facts(parts, prices),
            slowest=slowest,
            ledger=self._items(ledger(plan.stages[slowest], make_program(parts[slowest]), own, sent), prices[slowest]),
            pins=tuple(self._without_pins(parts, limit)),
            offers=tuple(offers),
            schedules=self._schedules(parts, part),
            near={} if space is None else space.near,
            not_below={} if space is None else space.not_below,
            baselines=self._baselines(own),
            unanswered=tuple(self.questions.unanswered),
            is_in_buckets=plan.estimate.search.is_in_buckets,
        )

    def _prices(self, parts: Sequence[CapturedModel], part: Cluster) -> list[StagePrice]:
        plan, out = self.plan, []
        send = cheapest("send_recv", axis_links(self.cluster, (plan.pipeline, plan.mesh.size), (0,)))
        for number, stage in enumerate(parts):
            after = plan.stages[number + 1].layouts if number + 1 < len(parts) else {}
            sent = {n: after[n] for n in stage.sends}
            own, splits = plan.stages[number], plan.schedule in SPLITTING
            out.append(price_stage(own, stage, make_program(stage), part, sent, send, splits=splits))
        return out

    def _items(self, whole: Ledger, price: StagePrice) -> Ledger:
        """A stage's, with what two parts of backward take more than one."""
        if price.weights is None:
            return whole
        spent = self.plan.microbatches * price.passing + price.once
        more = spent - sum(item.amount for item in whole.seconds)
        twice = Item(kind="backward", what="read or gathered for both parts of backward", count=1, amount=more)
        return replace(whole, seconds=tuple(sorted((*whole.seconds, twice), key=lambda item: -item.amount)))

    def _facts(self, parts: Sequence[CapturedModel], prices: Sequence[StagePrice]) -> tuple[StageFacts, ...]:
        plan = self.plan
        order = make_order(plan.schedule, plan.pipeline, plan.microbatches, plan.num_stages // plan.pipeline)
        flying = in_flight(order)
        return tuple(
            StageFacts(
                number=number,
                rank=plan.stage_rank(number),
                blocks=blocks_text(
                    n.meta["module"] for n in stage.graph.nodes if n.op == "call_function" and requires_grad(n)
                ),
                forward=price.forward,
                backward=price.back,
                sent=price.sent,
                once=price.once,
                memory=price.memory.alone(plan.microbatches),
                flying=flying[number],
                in_flight=price.memory.in_flight * (flying[number] - 1),
            )
            for number, (stage, price) in enumerate(zip(parts, prices, strict=True))
            if price.memory is not None
        )

    def _without_pins(self, parts: Sequence[CapturedModel], limit: float) -> Iterator[Alternative]:
        """The best plans of this arrangement without each pin."""
        plan = self.plan
        for text, config in lifted_pins(plan.config):
            if self.questions.asks(f"without {text}"):
                found = self._offer(text, self.cluster, limit, parts, config)
                yield Alternative(
                    without=text, seconds=found.best, bound=found.bound, nbytes=found.nbytes, why_not=found.why_not
                )

    def _offer(
        self,
        change: str,
        cluster: Cluster,
        limit: float,
        parts: Sequence[CapturedModel],
        config: TrainConfig | None = None,
    ) -> Offer:
        """The plan as it is under the change, and the best with its arrangement. config: instead of the plan's."""
        plan = self.plan
        part = part_of(cluster, plan.pipeline)
        own = priced(plan, parts, cluster, part).estimate
        same = own.step_seconds if own.peak_nbytes <= limit else None
        if plan.schedule not in SEARCHED:
            why = f"schedule {plan.schedule} is not searched"
            return Offer(change=change, same=same, best=same, nbytes=own.peak_nbytes, why_not=why)
        key = Candidate(
            arrangement=Arrangement(
                pipeline=plan.pipeline, cluster=part, mesh=plan.mesh, is_named=bool(plan.config.pins)
            ),
            microbatches=plan.microbatches,
            schedule=plan.schedule,
            chunks=plan.num_stages // plan.pipeline,
        )
        joint = Joint(
            graph=lambda _: self.captured,
            setup=Setup(
                counts=(plan.microbatches,),
                cluster=cluster,
                config=replace(config or plan.config, memory_nbytes=limit),
                options=SearchOptions(relative_gap=self.relative_gap),
            ),
        )
        is_marked = plan.estimate.search.is_in_buckets  # the search counts without buckets: no bound of it holds
        left = self.questions.left()
        try:
            joint.bound(key)
            while not joint.sharpen(key, math.inf):
                pass
            found, seconds, bound = joint.solve(key, math.inf if same is None or is_marked else same, left)
        except CutoffError as error:
            bound = min(max(error.bound, joint.bound(key)), same or math.inf)
            return Offer(change=change, same=same, best=same, bound=bound, nbytes=own.peak_nbytes)
        except InfeasibleError as error:
            return Offer(change=change, same=same, best=same, why_not=str(error))
        except SearchTimeoutError:
            return Offer(change=change, same=same, best=same, why_not="no plan that fits was found in the time given")
        if is_marked:
            found = in_buckets(found, self.captured, cluster)
            seconds, proved = found.estimate.step_seconds, 0.0
        else:
            proved = max(bound, joint.bound(key))
        best, nbytes = seconds, found.estimate.peak_nbytes
        if same is not None and same < best:
            best, nbytes = same, own.peak_nbytes
        return Offer(change=change, same=same, best=best, bound=min(proved, best), nbytes=nbytes)

    def _schedules(self, parts: Sequence[CapturedModel], part: Cluster) -> dict[str, tuple[float, float] | str]:
        """The same stages on the same ranks in every other order."""
        plan = self.plan
        out: dict[str, tuple[float, float] | str] = {}
        for name in SCHEDULES:
            try:
                ranks = stage_ranks(name, plan.pipeline, plan.num_stages)
            except ArgumentError:
                continue  # it needs other stages
            if name == plan.schedule or ranks != stage_ranks(plan.schedule, plan.pipeline, plan.num_stages):
                continue
            try:
                estimate = priced(replace(plan, schedule=name), parts, self.cluster, part).estimate
                out[name] = estimate.step_seconds, estimate.peak_nbytes
            except ArgumentError as error:
                out[name] = str(error)
        return out

    def _baselines(self, pricer: Pricer) -> dict[str, float | str]:
        """Named kinds in as many stages, on the same mesh and schedule."""
        plan, out = self.plan, dict[str, float | str]()
        if plan.estimate.named_baselines:
            return dict(plan.estimate.named_baselines)
        chunks, program = plan.num_stages // plan.pipeline, make_program(self.captured)
        for kind in BASELINES:
            text = f"{kind}:pp={plan.pipeline},vpp={chunks},schedule={plan.schedule}"
            if self.questions.asks(f"baseline {text}"):
                try:
                    made = staged_baseline(parse_configuration(text), program, pricer.for_another(), self.cluster)
                    if plan.estimate.search.is_in_buckets:
                        made = in_buckets(made, self.captured, self.cluster)
                    out[made.origin] = made.estimate.step_seconds
                except (InfeasibleError, ArgumentError) as error:
                    out[text] = str(error)
        return out
