"""The race's link: payload that crosses it is what a walk through Gloo's algorithms counts; its hosts are removed."""

import os
import random
import shutil
import subprocess

import pytest

from autopar.values.mesh import make_mesh
from benchmarks.race import spearman, tied
from benchmarks.race_hosts import Hosts, HostsError
from benchmarks.race_traffic import crossing, groups_along


def walked(kind: str, members: tuple[int, ...], first_host: int, parts: int) -> int:
    """Parts (n of a tensor, each of `parts` units) that go from the first host to the second, step by step."""
    n, crossed = len(members), 0

    def send(source: int, target: int, units: int) -> int:
        return units if members[source] < first_host <= members[target] else 0

    if kind == "all_to_all":
        return sum(send(i, j, parts) for i in range(n) for j in range(n) if i != j)
    passes = 1 if kind == "all_gather" else 2
    for _ in range(passes):  # reduce-scatter, then all-gather: n-1 steps, a part from each rank to its neighbour
        crossed += sum(send(i, (i + 1) % n, parts) for _ in range(n - 1) for i in range(n))
    return crossed


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_crossing_is_what_a_walk_counts(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(50):
        world = rng.choice((2, 4, 8, 16))
        members = tuple(sorted(rng.sample(range(world), rng.randint(2, world))))
        parts = rng.randint(1, 1000)
        assert crossing(kind, members, world // 2, parts * len(members)) == pytest.approx(
            walked(kind, members, world // 2, parts)
        )


def test_groups_along_axes() -> None:
    mesh = make_mesh((2, 2))
    first, second = mesh.names
    assert groups_along(mesh, (first,)) == [(0, 2), (1, 3)]
    assert groups_along(mesh, (second,)) == [(0, 1), (2, 3)]
    assert groups_along(mesh, mesh.names) == [(0, 1, 2, 3)]


def test_spearman() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 6]) == pytest.approx(1)
    assert tied([1.04, 1.0, 1.02, 1.03, 1.06]) == [1.04, 1.0, 1.0, 1.0, 1.04]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"), reason="needs root, ip, tc")
def test_hosts_are_removed_when_a_run_breaks() -> None:
    try:
        with Hosts() as hosts:
            hosts.shape("100mbit")
            own = hosts.start(0, ["sleep", "600"], dict(os.environ))
            assert set(hosts.names) <= set(namespaces())
            raise KeyboardInterrupt
    except HostsError as error:
        pytest.skip(f"no namespaces here: {error}")
    except KeyboardInterrupt:
        pass
    assert own.poll() is not None
    assert not set(hosts.names) & set(namespaces())


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line]
