"""Memory: activations equal Korthikanti's table, state equals bytes a parameter, the peak follows the schedule."""

import csv
import random
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost_models.activation_memory import layer_nbytes
from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.step_memory import in_flight, stage_intervals, step_memory
from autopar.cost_models.training_config import TrainingConfig, stage_layers, stage_params
from autopar.cost_models.transformer import TransformerShape, num_params

TABLE = Path(__file__).resolve().parents[2] / "shared" / "references" / "korthikanti_layers_and_memory.csv"
TECHNIQUES = {
    "no parallelism": {"tp": 1},
    "tensor parallel (baseline)": {},
    "tensor + sequence parallel": {"sequence_parallel": True},
    "tensor parallel + selective recompute": {"recompute": "selective"},
    "tensor + sequence parallel + selective recompute": {"sequence_parallel": True, "recompute": "selective"},
    "full recompute": {"recompute": "full"},
}


def gpt(layers: int, hidden: int, heads: int) -> TransformerShape:
    base = named_shape("gpt-175b")
    return replace(
        base, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden
    )


def config(**fields: object) -> TrainingConfig:
    return TrainingConfig(**{"micro_batch": 1, "global_batch": 64, "seq": 2048, "attention": "fused", **fields})  # type: ignore[arg-type]


def published_formulas() -> dict[str, str]:
    if not TABLE.is_file():
        pytest.skip(f"no {TABLE.name} beside the repository")
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return {r["technique"]: r["value"] for r in csv.DictReader(stream) if r["unit"] == "bytes (formula)"}


@pytest.mark.parametrize("seed", range(10))
def test_a_layer_keeps_what_table_2_says(seed: int) -> None:
    rng = random.Random(seed)
    formulas = published_formulas()
    assert set(formulas) == set(TECHNIQUES)
    for technique, formula in formulas.items():
        t = 1 if technique == "no parallelism" else rng.choice([2, 4, 8])
        a, b, s = 8 * rng.randint(1, 12), rng.randint(1, 8), 64 * rng.randint(1, 64)
        h = a * rng.choice([64, 80, 128])
        made = config(seq=s, micro_batch=b, global_batch=b, **{"tp": t, **TECHNIQUES[technique]})
        expected = eval(formula, {"__builtins__": {}}, {"s": s, "b": b, "h": h, "a": a, "t": t})
        assert layer_nbytes(gpt(2, h, a), made) == pytest.approx(expected), technique


# Korthikanti et al. 2022, figure 1: GiB of activations on the first stage, no recompute, tensor parallel.
@pytest.mark.parametrize(
    ("model", "pp", "v", "batch", "gib"),
    [((48, 6144, 64), 1, 1, 4, 59.25), ((96, 12288, 96), 8, 3, 1, 66.84375), ((105, 20480, 128), 35, 3, 1, 114.0234375),
     ((128, 25600, 160), 64, 1, 1, 131.25)],
)  # fmt: skip
def test_the_first_stage_holds_what_figure_1_shows(
    model: tuple[int, int, int], pp: int, v: int, batch: int, gib: float
) -> None:
    shape = gpt(*model)
    made = config(tp=8, pp=pp, virtual_stages=v, micro_batch=batch, global_batch=batch * 512)
    saved = in_flight(made, 0) * stage_layers(shape.layers, pp)[0] * layer_nbytes(shape, made)
    assert saved / 2**30 == pytest.approx(gib, rel=2e-3)


@pytest.mark.parametrize("p", [2, 3, 8, 35])
@pytest.mark.parametrize("m", [1, 5, 200])
def test_micro_batches_in_flight(p: int, m: int) -> None:
    flight = {name: [in_flight(config(pp=p, global_batch=m, schedule=name), i) for i in range(p)]
              for name in ("1f1b", "gpipe", "zb-1p", "zb-2p")}  # fmt: skip
    assert flight["1f1b"] == [min(m, p - i) for i in range(p)]
    assert set(flight["gpipe"]) == {m}
    assert all(a <= b for a, b in zip(flight["1f1b"], flight["zb-1p"], strict=True))
    assert max(flight["zb-2p"]) == min(m, 2 * p - 1)
    for v in (2, 3):
        first = in_flight(config(pp=p, global_batch=m * p, virtual_stages=v), 0)
        assert first == pytest.approx(min(m * p, p * (1 + (p - 1) / (p * v)))), "Korthikanti's 1 + (p-1)/(pv)"


@pytest.mark.parametrize(
    ("zero", "precision", "main_grads", "fused", "nbytes"),
    [
        (0, "bf16", True, True, 18),
        (0, "bf16", True, False, 20),
        (0, "fp16", False, False, 16),
        (0, "fp32", False, False, 16),
        (1, "fp16", False, False, 2 + 2 + 12 / 4),
        (2, "fp16", False, False, 2 + 14 / 4),
        (3, "bf16", False, False, 16 / 4),
    ],
)
def test_state_is_bytes_a_parameter(zero: int, precision: str, main_grads: bool, fused: bool, nbytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, figure 1; FSDP2's shards are float32: 4 + 4 + 8."""
    made = config(dp=4, zero=zero, precision=precision, main_grads=main_grads, fused_grad_sum=fused)
    shape = named_shape("gpt2")
    state = {"parameters", "gradients", "master copies", "optimizer state", "16-bit gradients"}
    held = sum(i.nbytes for name, i in stage_intervals(shape, made, 0) if name in state)
    assert held == pytest.approx(nbytes * num_params(shape), rel=1e-4)


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
@pytest.mark.parametrize("tp", [1, 4])
def test_stages_and_ranks_hold_every_parameter(pp: int, tp: int) -> None:
    shape = named_shape("llama-3-8b")
    made = config(pp=pp, tp=tp)
    total = tp * sum(stage_params(shape, made, stage) for stage in range(pp))
    norms = (2 * shape.layers + 1) * shape.hidden  # whole on every tensor-parallel rank
    assert total == pytest.approx(num_params(shape) + (tp - 1) * norms, rel=1e-6)
    assert sum(stage_layers(shape.layers, pp)) == shape.layers


@pytest.mark.parametrize(("layers", "pp", "expected"), [
    (8, 4, (2, 2, 2, 2)), (22, 8, (2, 3, 3, 3, 3, 3, 3, 2)), (7, 3, (2, 3, 2)), (8, 3, (3, 3, 2)), (5, 2, (3, 2)),
])  # fmt: skip
def test_layers_of_uneven_stages(layers: int, pp: int, expected: tuple[int, ...]) -> None:
    assert stage_layers(layers, pp) == expected


def test_less_is_held_with_more_sharding_and_more_recompute() -> None:
    shape = named_shape("gpt-22b")
    base = config(tp=8, dp=4, micro_batch=2)
    previous = step_memory(shape, base).allocated_nbytes
    for step in ({"zero": 1}, {"sequence_parallel": True}, {"recompute": "selective"}, {"recompute": "full"}):
        base = replace(base, **step)  # type: ignore[arg-type]
        held = step_memory(shape, base).allocated_nbytes
        assert held < previous, step
        previous = held


def test_the_peak_is_named() -> None:
    memory = step_memory(named_shape("gpt-22b"), config(tp=8, micro_batch=4))
    assert sum(nbytes for _, nbytes in memory.kinds) == memory.allocated_nbytes
    assert all(nbytes % 512 == 0 for _, nbytes in memory.kinds)
    assert memory.with_reserve("allocated") < memory.with_reserve("reserved") < memory.with_reserve("nvidia-smi")


def test_what_lasts_leaves_no_free_pieces_and_every_kind_of_group_has_its_buffers() -> None:
    shape = named_shape("gpt-22b")
    one, two = (step_memory(shape, config(tp=8, micro_batch=size)) for size in (1, 2))
    state = 20 * stage_params(shape, config(tp=8), 0)
    assert one.lasting_nbytes == two.lasting_nbytes == pytest.approx(state, rel=1e-6)
    came = two.allocated_nbytes - one.allocated_nbytes
    assert two.with_reserve("reserved") - one.with_reserve("reserved") == pytest.approx(1.06 * came)
    beyond = [
        memory.with_reserve("nvidia-smi") - memory.with_reserve("reserved")
        for memory in (
            step_memory(shape, config(**degrees)) for degrees in ({}, {"cp": 2, "dp": 2}, {"tp": 2, "pp": 2})
        )
    ]
    assert beyond == pytest.approx([4e9, 5e9, 6e9])
