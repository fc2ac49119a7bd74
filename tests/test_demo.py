"""The demo's parts: equal calls give equal models and batches, the loop learns, parted runs are seen."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autopar
from examples.demo import demo
from examples.demo.curves import HEIGHT, largest_difference, plot, side_by_side
from examples.demo.data import batches, corpus
from examples.demo.model import GLOBAL_BATCH, SEQUENCE, llama
from examples.demo.training import train


def test_the_model_is_the_same_every_time_and_of_the_size_promised() -> None:
    state = torch.random.get_rng_state()
    one, example = llama()
    torch.rand(1)
    other, _ = llama()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert 5e6 <= sum(p.numel() for p in one.parameters()) <= 10e6
    assert {key: tuple(value.shape) for key, value in example.items()} == dict.fromkeys(
        ("input_ids", "labels"), (GLOBAL_BATCH, SEQUENCE)
    )
    torch.random.set_rng_state(state)
    expected = torch.rand(1)
    torch.random.set_rng_state(state)
    llama()
    assert torch.equal(torch.rand(1), expected), "llama() must not move the global random state"


def test_the_corpus_is_every_source_file_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"second\xff")
    (tmp_path / "a.py").write_bytes(b"first ")
    (tmp_path / "c.txt").write_bytes(b"not source")
    assert bytes(corpus(tmp_path).tolist()) == b"first second\xff"


def test_the_standard_library_is_there_and_text() -> None:
    text = corpus()
    assert len(text) > 1_000_000
    assert b"def " in bytes(text[:100_000].tolist())


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source files"):
        corpus(tmp_path)


def test_batches_are_windows_of_the_text_set_by_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    one = batches(text, num_steps=30, batch=4, sequence=7, seed=3)
    again = batches(text, num_steps=30, batch=4, sequence=7, seed=3)
    other = batches(text, num_steps=30, batch=4, sequence=7, seed=4)
    assert len(one) == 30
    for a, b in zip(one, again, strict=True):
        assert a["input_ids"].shape == (4, 7) and a["input_ids"].dtype == torch.int64
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["input_ids"], a["labels"])
        assert (a["input_ids"].diff(dim=1) == 1).all(), "each window is contiguous"
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other, strict=True))


def test_windows_reach_both_ends_of_the_text_and_no_further() -> None:
    text = torch.arange(5, dtype=torch.uint8)
    seen = {int(row[0]) for step in batches(text, num_steps=50, batch=2, sequence=3) for row in step["input_ids"]}
    assert seen == {0, 1, 2}
    with pytest.raises(ValueError, match="shorter sequence"):
        batches(text, num_steps=1, batch=1, sequence=6)


class Line(nn.Module):
    """loss = (weight - target)^2, whose gradient is 2 (weight - target)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, target: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.weight - target) ** 2)


def test_the_loop_steps_as_adamw_does() -> None:
    seen: list[tuple[int, float]] = []
    losses = train(Line(), [{"target": torch.tensor(1.0)}] * 3, 0.25, lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(losses, start=1))
    # Adam's first step is lr in the gradient's direction: the weight goes from 0 to 0.25, the loss from 1 to 0.75^2.
    assert losses[0] == 1.0
    assert losses[1] == pytest.approx(0.75**2, rel=1e-6)
    assert losses[2] < losses[1]


def test_the_model_learns_its_text_in_a_few_steps() -> None:
    model, _ = llama()
    losses = train(model, batches(corpus(), num_steps=6, batch=GLOBAL_BATCH, sequence=SEQUENCE), 1e-3)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3), "an untrained model guesses among 256 bytes"
    assert losses[-1] < losses[0] - 1


def test_the_largest_difference_and_its_step() -> None:
    assert largest_difference([3.0, 2.0, 1.0], [3.0, 2.5, 1.25]) == (0.5, 2)
    assert largest_difference([3.0, 2.0], [3.0, math.nan]) == (math.inf, 2)
    with pytest.raises(ValueError, match="2 and 1 steps"):
        largest_difference([3.0, 2.0], [3.0])
    with pytest.raises(ValueError, match="0 and 0 steps"):
        largest_difference([], [])


def test_a_falling_line_is_drawn_from_top_left_to_bottom_right() -> None:
    assert plot([3.0, 2.0, 1.0], low=1.0, high=3.0, width=3, height=3) == ["•  ", " • ", "  •"]
    assert plot([1.0, 2.0, 3.0, 4.0], low=1.5, high=3.5, width=2, height=2) == [" •", "• "], "means of two steps"
    assert plot([2.0, math.nan], low=1.0, high=2.0, width=2, height=2) == ["• ", "  "]


def test_curves_share_one_scale() -> None:
    from rich.console import Console

    console = Console(width=140, file=None)
    with console.capture() as captured:
        console.print(side_by_side({"one": [5.0, 4.0], "four": [4.5, 3.0]}))
    drawn = captured.get()
    assert drawn.count("5.00 ┤") == 2 and drawn.count("3.00 ┤") == 2
    assert len(drawn.splitlines()) == HEIGHT + 3, "two panels beside each other: the plot, a footer and a border"


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def test_losses_of_the_processes_are_streamed_and_the_rest_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ['{"step": 1, "loss": 2.5}', "chatter", '{"step": 2, "loss": 1.5}']
    seen: list[tuple[int, float]] = []
    command = python(f"print({chr(10).join(lines)!r})")
    assert demo.train_in_processes(command, log, lambda step, loss: seen.append((step, loss))) == [2.5, 1.5]
    assert seen == [(1, 2.5), (2, 1.5)]
    assert log.read_text() == "chatter\n"


def test_a_failed_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*the reason"):
        demo.train_in_processes(
            python("import sys; print('the reason', file=sys.stderr); sys.exit(3)"), tmp_path / "log", lambda *_: None
        )


class FakePlan:
    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)


@pytest.mark.parametrize(
    ("shift", "expected"), [(0.0, 0), (demo.TOLERANCE / 2, 0), (demo.TOLERANCE * 2, 1), (math.nan, 1)]
)
def test_the_demo_fails_exactly_when_the_runs_part(
    shift: float, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "OUT", tmp_path / "out")
    monkeypatch.setattr(autopar, "plan", lambda *args, **kwargs: FakePlan(), raising=False)
    monkeypatch.setattr(demo, "train_in_one_process", lambda report: [3.0, 2.0, 1.0])
    monkeypatch.setattr(demo, "train_in_processes", lambda command, log, report: [3.0, 2.0 + shift, 1.0])
    assert demo.main() == expected
