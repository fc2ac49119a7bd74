"""Sample calls of products that are no matrix products: einsum, transposed convolutions."""

from tests.op_sample import Input, Sample, X, aten


def floats(*shapes: tuple[int, ...]) -> tuple[Input, ...]:
    return tuple(Input(shape=s) for s in shapes)


EINSUMS = tuple(
    Sample(
        name=f"einsum {equation}",
        target=aten.einsum.default,
        args=(equation, [X(i) for i in range(len(shapes))]),
        inputs=floats(*shapes),
    )
    for equation, *shapes in (
        ("b h d n, b h e n -> b h d e", (4, 2, 3, 6), (4, 2, 5, 6)),
        ("bi,oi->bo", (4, 6), (7, 6)),
        ("...ij,...jk", (4, 2, 3, 6), (2, 6, 5)),
        ("bij,j->...", (4, 2, 6), (6,)),
        ("i,j->ij", (4,), (6,)),
        ("bii->bi", (4, 3, 3)),
        ("bij->", (4, 3, 6)),
        ("bi,ij,bj->b", (4, 6), (6, 3), (4, 3)),
        ("bn,bn->b", (4, 1), (4, 6)),
    )
)

TRANSPOSED = (
    Sample(
        name="conv_transpose2d",
        target=aten.conv_transpose2d.input,
        args=(X(0), X(1), X(2), [2, 2]),
        inputs=floats((4, 6, 3, 3), (6, 8, 3, 3), (8,)),
    ),
    Sample(
        name="conv_transpose1d in groups",
        target=aten.conv_transpose1d.default,
        args=(X(0), X(1), X(2), [2], [1], [1], 2),
        inputs=floats((4, 6, 5), (6, 4, 3), (8,)),
    ),
)
