"""Named kinds in buckets: the cheaper of the plan that is best alone and of the one whose parameters share starts."""

from dataclasses import replace

import pytest

import autopar
import tests.runtime_cases as cases
from autopar.errors import InfeasibleError
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.baselines import baseline_plan
from autopar.search.timeline.buckets import bucketed
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.values.cluster import Cluster
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine, program_of

ROOM = 1e12


def two_hosts(alpha: float, rate: float) -> Cluster:
    """Of two processes each; rate: of the link, a part of that inside."""
    cluster = machine(4)
    fast = cluster.levels[-1]
    inside = replace(fast, size=2, alpha=alpha, launch=alpha, lines=())
    between = replace(
        fast, name="link", size=2, alpha=4 * alpha, launch=alpha, bandwidth=rate * fast.bandwidth, lines=()
    )
    return replace(cluster, levels=(between, inside))


def both(name: str, family: str, pricer: Pricer) -> list[StagePlan]:
    """In buckets: the plan that is best alone, and the one whose search shares starts."""
    program = program_of(family)
    return [bucketed(baseline_plan(name, program, own, ROOM), program, pricer) for own in (pricer, pricer.shared)]


def test_the_cheaper_of_two_is_taken_and_either_may_be_it() -> None:
    cheaper = set()
    for family in ("llama", "gpt2"):
        for name in ("fsdp", "megatron"):
            for alpha in (1e-7, 1e-5):
                for rate in (0.02, 0.5):
                    cluster = two_hosts(alpha, rate)
                    pricer = make_pricer(mesh=make_mesh((2, 2)), cluster=cluster, config=TrainConfig())
                    alone, shared = (plan.estimate.step_seconds for plan in both(name, family, pricer))
                    found = named_in_buckets(name, program_of(family), pricer, ROOM)
                    assert found.origin == name and found.estimate.step_seconds == min(alone, shared)
                    cheaper.add("alone" if alone < shared else "shared" if shared < alone else "either")
    assert {"alone", "shared"} <= cheaper


def test_a_baseline_costs_beside_a_plan_what_it_costs_when_asked_for() -> None:
    cluster, batch = two_hosts(1e-5, 0.1), cases.batch(0)
    about = {"cluster": cluster, "mesh": "2x2", "optimizer": "adamw", "precision": "fp64"}
    beside = autopar.plan(cases.words(), batch, **about).estimate.named_baselines
    for name, seconds in beside.items():
        if isinstance(seconds, str):
            with pytest.raises(InfeasibleError):
                autopar.plan(cases.words(), batch, baseline=name, **about)
        else:
            asked = autopar.plan(cases.words(), batch, baseline=name, **about)
            assert asked.estimate.step_seconds == pytest.approx(seconds, rel=1e-9) and asked.origin == name
    assert {"ddp", "fsdp"} <= {name for name, seconds in beside.items() if not isinstance(seconds, str)}


def test_what_does_not_fit_alone_is_an_error_and_what_fits_stays_within_its_limit() -> None:
    program = program_of("llama")
    pricer = make_pricer(mesh=make_mesh((4,)), cluster=machine(4), config=TrainConfig())
    whole = named_in_buckets("fsdp", program, pricer, ROOM).estimate.peak_nbytes
    least = baseline_plan("fsdp", program, pricer, ROOM).estimate.peak_nbytes
    tight = pricer.within(least)
    assert named_in_buckets("fsdp", program, tight, least).estimate.peak_nbytes <= least <= whole
    with pytest.raises(InfeasibleError, match="fsdp does not fit"):
        named_in_buckets("fsdp", program, pricer, 1e3)
