"""Bodies that communicate: right on every rank, and sending exactly the messages that their rule predicts."""

import pytest
from test_rules import cases

from autopar.ops.groups import Groups
from autopar.rules.registry import rule_of
from autopar.values.mesh import Mesh
from autopar.values.redistribution import Message
from tests.op_sample import Sample
from tests.op_samples import SAMPLES
from tests.ranks_in_threads import run_in_threads
from tests.rules_on_ranks import check_node, local_of, sampled_call

COMMUNICATING = [s for s in SAMPLES if rule_of(s.node()).messages is not None]


def test_there_are_bodies_that_communicate() -> None:
    assert {s.name.split()[0].rstrip(",") for s in COMMUNICATING} == {"cross_entropy", "batch_norm"}


def total(messages: tuple[Message, ...], mesh: Mesh) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, axis names) -> (calls, bytes), as `Groups` counts them."""
    sent: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for message in messages:
        key = (message.kind, tuple(mesh.names[a] for a in message.axes))
        calls, nbytes = sent.get(key, (0, 0))
        sent[key] = (calls + 1, nbytes + message.nbytes)
    return sent


@pytest.mark.parametrize("sample", COMMUNICATING, ids=lambda s: s.name)
def test_body_on_shards_is_the_op_and_sends_what_its_rule_says(sample: Sample) -> None:
    node = sample.node()
    rule = rule_of(node)
    tried = cases(node, rule, communicates=True)
    assert tried
    for mesh, chosen in tried:
        counted: list[Groups] = []

        def run(mesh: Mesh, one_rank, counted=counted) -> list:
            outcomes, groups = run_in_threads(mesh, one_rank)
            counted.extend(groups)
            return outcomes

        try:
            check_node(*sampled_call(sample), mesh, chosen, run)
            forward, backward = rule.messages(local_of(node, chosen, mesh))
            for groups in counted:
                assert groups.sent == total((*forward, *backward), mesh)
        except Exception as error:
            raise AssertionError(f"{mesh.shape} {[c.name for c in chosen]}: {error}") from error
