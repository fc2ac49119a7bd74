"""Machines and captured models for tests of the search: links fast enough that splitting pays on tiny models."""

from dataclasses import replace
from functools import lru_cache

from autopar.capture import capture
from autopar.cluster import Cluster, load_cluster
from autopar.graph import CapturedModel
from autopar.mesh import make_mesh
from autopar.plan import TrainConfig
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program, make_program
from tests.zoo import zoo


@lru_cache
def machine(count: int = 4, bandwidth: float = 5e9) -> Cluster:
    """CPUs with hardly any latency, so that bytes and flops decide."""
    cluster = load_cluster(f"{count}xcpu")
    levels = tuple(replace(level, alpha=1e-7, bandwidth=bandwidth) for level in cluster.levels)
    return replace(cluster, levels=levels, device=replace(cluster.device, launch_seconds=1e-8))


@lru_cache
def captured_of(family: str) -> CapturedModel:
    model, kwargs = zoo(family)
    return capture(model, (), kwargs)


@lru_cache
def program_of(family: str) -> Program:
    return make_program(captured_of(family))


def pricer_of(mesh: tuple[int, ...], *, bandwidth: float = 5e9, config: TrainConfig | None = None) -> Pricer:
    return Pricer(mesh=make_mesh(mesh), cluster=machine(bandwidth=bandwidth), config=config or TrainConfig())
