"""Sample calls of a mixture's layer, of one or two leading dims, and of a mask of groups of experts."""

from autopar.ops.grouped_linear import grouped_linear
from tests.op_sample import Input, Sample, X, aten


def _sample(title: str, x: tuple[int, ...], k: int, weight: tuple[int, int, int], frozen: str = "") -> Sample:
    inputs = (
        Input(shape=x, grad=frozen != "x"),
        Input(shape=(*x[:-2], k), kind="ids", high=weight[0]),
        Input(shape=weight, grad=frozen != "weight"),
    )
    return Sample(name=f"grouped_linear {title}", target=grouped_linear, args=(X(0), X(1), X(2)), inputs=inputs)


EXPERTS = (
    _sample("to all experts of a token", (6, 4, 1, 6), 2, (4, 6, 10)),
    _sample("a row an expert", (12, 3, 6), 3, (6, 6, 5)),
    _sample("one expert a token", (4, 1, 6), 1, (6, 6, 8)),
    _sample("more experts than rows", (2, 2, 12), 2, (12, 12, 6)),
    _sample("of inputs", (4, 6, 1, 6), 2, (4, 6, 7), frozen="x"),
    _sample("with frozen matrices", (4, 6, 2, 6), 2, (4, 6, 7), frozen="weight"),
    Sample(
        name="scatter, a number",
        target=aten.scatter.value,
        args=(X(0), 2, X(1), 1.0),
        inputs=(Input(shape=(4, 6, 5)), Input(shape=(4, 3, 2), kind="ids", high=5)),
    ),
)
