"""Sample calls of ops that draw random numbers."""

from autopar.ops.drawn import drawn
from autopar.ops.dropout import alpha_dropout, dropout, rrelu
from autopar.ops.noise import noise
from tests.op_sample import Input, Sample, X

RANDOM = (
    Sample(name="dropout", target=dropout, args=(X(0), 0.4), kwargs={"site": 5}, inputs=(Input(shape=(4, 6, 5)),)),
    *(
        Sample(
            name=f"{target.__name__} along {along}",
            target=target,
            args=(X(0), 0.4),
            kwargs={"site": 5, "along": along},
            inputs=(Input(shape=(4, 6, 5)),),
        )
        for target, along in ((dropout, (0, 1)), (dropout, (0,)), (alpha_dropout, None), (alpha_dropout, (0, 1)))
    ),
    Sample(name="rrelu", target=rrelu, args=(X(0), 0.1, 0.9), kwargs={"site": 5}, inputs=(Input(shape=(4, 6, 5)),)),
    *(
        Sample(
            name=f"noise {fill} {order}",
            target=noise,
            args=(X(0), fill, *numbers),
            kwargs={"size": (4, 6, 5), "site": 5, "order": order},
            inputs=(Input(shape=(), grad=False),),
        )
        for fill, numbers, order in (("normal_", (0.0, 1.0), None), ("uniform_", (0.0, 1.0), (2, 0, 1)))
    ),
    Sample(
        name="noise bernoulli_",
        target=noise,
        args=(X(0), "bernoulli_", X(1)),
        kwargs={"size": (4, 6, 5), "site": 5},
        inputs=(Input(shape=(), grad=False), Input(shape=(6, 1), grad=False)),
    ),
    *(
        Sample(
            name=f"drawn {op}",
            target=drawn,
            args=(op, X(0), *numbers),
            kwargs={"site": 5},
            inputs=(Input(shape=(4, 6, 5), kind="positive", grad=graded),),
        )
        for op, graded, numbers in (
            ("poisson.default", False, ()),
            ("_standard_gamma.default", True, ()),
            ("_sample_dirichlet.default", True, ()),
        )
    ),
    Sample(
        name="drawn multinomial",
        target=drawn,
        args=("multinomial.default", X(0), 3),
        kwargs={"site": 5},
        inputs=(Input(shape=(4, 5), kind="positive", grad=False),),
    ),
)
