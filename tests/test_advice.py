"""Advice is the best of what a framework can express, and what it writes says what it advises."""

import json
import random
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from autopar.advice.advise import advise, cluster_of, read_own, sizes
from autopar.advice.candidates import layouts, micro_batches, offloads
from autopar.advice.framework import Framework, TransformerJob
from autopar.advice.frameworks import FRAMEWORKS, framework_named
from autopar.advice.rank import price, rank
from autopar.cli.main import main
from autopar.cost_models.data_exchange import data_exchange
from autopar.cost_models.efficiency import load_efficiency
from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.step_memory import step_memory
from autopar.cost_models.step_time import simulate_step
from autopar.cost_models.training_config import TrainingConfig
from autopar.cost_models.transformer import TransformerShape
from autopar.errors import ArgumentError, AutoparError, ClusterError, MeshError
from autopar.values.cluster import load_cluster

ALL = [pytest.param(framework, id=name) for name, framework in FRAMEWORKS.items()]
SMALL = TransformerShape(
    name="small", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1024, gated=True
)
# What no file of the framework says: batches are the script's under Accelerate, and files do not name what they do not
# change.
UNSAID = {"accelerate": {"micro_batch", "global_batch", "recompute"}, "deepspeed": {"recompute"}}


def job_of(
    shape: TransformerShape = SMALL, cluster: str = "8xh100", global_batch: int = 16, seq: int = 4096
) -> TransformerJob:
    return TransformerJob(shape=shape, cluster=load_cluster(cluster), global_batch=global_batch, seq=seq)


def configurations(framework: Framework, job: TransformerJob) -> list[TrainingConfig]:
    return [
        replace(layout.config, micro_batch=size, recompute=kind, offload=offload)
        for layout in layouts(framework, job)
        for size in micro_batches(layout)
        for offload in offloads(framework, job, layout)
        for kind in framework.space.recompute
    ]


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize("seed", range(2))
def test_the_best_is_the_best_of_all(framework: Framework, seed: int) -> None:
    """No shortcut of the ranking loses a configuration: against pricing every one, under limits that bind."""
    draw = random.Random(seed)
    shape = replace(SMALL, layers=draw.choice((2, 4, 6)), hidden=draw.choice((512, 2048)), vocab=32000)
    cluster = load_cluster(draw.choice(("4xh100", "2x2xa100")))
    unlimited = TransformerJob(shape=shape, cluster=cluster, global_batch=8, seq=2048)
    least = min(price(framework, unlimited, config).nbytes for config in configurations(framework, unlimited))
    limit = int(least * draw.choice((1.05, 1.5, 3)))
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=limit))
    job = replace(unlimited, cluster=cluster)
    every = [price(framework, job, config) for config in configurations(framework, job)]
    fastest = min((each.seconds for each in every if each.fits), default=None)
    found = rank(framework, job, 3)
    assert all(each.fits for each in found.best) and not any(each.fits for each in found.too_large)
    assert (found.best[0].seconds if found.best else None) == pytest.approx(fastest, rel=1e-12)


@pytest.mark.parametrize("framework", ALL)
def test_what_is_written_says_what_was_chosen(framework: Framework) -> None:
    """read(write(configuration)) is the configuration; Lightning's and torch's are Python, which is not run."""
    job = job_of(named_shape("llama-3-8b"), "4x8xh100", 64, 8192)
    names = {"tp", "pp", "dp", "cp", "ep", "zero", "replicate", "keep_gathered", "virtual_stages", "schedule"}
    names |= {"micro_batch", "global_batch", "recompute", "offload", "precision"}
    names -= UNSAID.get(framework.name, set())
    draw = random.Random(0)
    for config in draw.sample(every := configurations(framework, job), min(60, len(every))):
        config = replace(config, precision=draw.choice(framework.space.precisions))
        written = framework.write(job.site, config, framework.sharding_of(config))
        assert all(one.text.endswith("\n") or "\\" in one.text for one in written)
        if written[0].language == "python":
            compile(written[0].text, written[0].name, "exec")
            continue
        if any(one.language == "python" and "ParallelismConfig(" in one.text for one in written):
            continue  # the Trainer takes degrees as an object
        name = f"x.{written[0].language}"
        said, unread = read_own(framework, written[0].text, name, job.site)
        assert not {key for key in unread if "size" in key or "degree" in key}
        defaults = {f.name: f.default for f in fields(TrainingConfig)}
        again = {name: said.get(name, defaults[name]) for name in names}
        assert again == {name: getattr(config, name) for name in names}, written[0].text


def test_groups_that_replicate_hold_more_and_send_less_far() -> None:
    """HSDP: state is split over a group's ranks; between groups only gradients' shards travel."""
    shape = named_shape("llama-3-8b")
    whole = TrainingConfig(dp=32, zero=3, micro_batch=1, global_batch=64, seq=4096)
    grouped = replace(whole, replicate=4)
    held = [dict(step_memory(shape, config).kinds)["optimizer state"] for config in (whole, grouped)]
    assert held[1] / held[0] == pytest.approx(4, rel=1e-3)
    slow = load_cluster("4x8xh100@10gbe")  # one slow link a node: shards of gradients cross it instead of parameters
    sent = [data_exchange(shape, config, slow, 0.8).seconds(0.8, 0.8) for config in (whole, grouped)]
    assert sent[1] < 0.9 * sent[0]
    with pytest.raises(MeshError, match="replicate 5 does not divide dp 32"):
        replace(whole, replicate=5)
    with pytest.raises(ArgumentError, match="zero is 0"):
        replace(whole, zero=0, replicate=4)


def test_parameters_that_stay_gathered_are_gathered_once() -> None:
    shape, cluster = named_shape("llama-3-8b"), load_cluster("4x8xh100")
    whole = TrainingConfig(dp=32, zero=3, micro_batch=1, global_batch=64, seq=4096)
    kept = replace(whole, keep_gathered=True)
    a, b = (data_exchange(shape, config, cluster, 0.8).sent.wire_seconds for config in (whole, kept))
    gather = 2 * 8.03e9  # bytes of the parameters in bf16; one gather of three passes over the same links is saved
    assert b < a
    assert step_memory(shape, kept).allocated_nbytes - step_memory(shape, whole).allocated_nbytes > 0.8 * gather


def test_what_the_host_holds_is_not_on_the_device_and_takes_time() -> None:
    """DeepSpeed's two kinds and FSDP's one: bytes go down by what moves, seconds up by copies and the host's update."""
    shape, cluster = named_shape("llama-3-8b"), load_cluster("8xh100")
    base = TrainingConfig(dp=8, zero=3, micro_batch=1, global_batch=8, seq=4096, recompute="full")
    names = ("none", "optimizer", "all")
    kinds = {name: dict(step_memory(shape, replace(base, offload=name)).kinds) for name in names}
    assert kinds["optimizer"]["parameters"] == pytest.approx(kinds["none"]["parameters"] / 2, rel=1e-3)
    assert "optimizer state" not in kinds["optimizer"] and "parameters" not in kinds["all"]
    efficiency = load_efficiency("h100")
    seconds = [simulate_step(shape, replace(base, offload=name), cluster, efficiency).seconds for name in names]
    assert seconds[0] < seconds[1] and seconds[0] < seconds[2]
    with pytest.raises(ClusterError, match="the host of device v100 is not known"):
        old = replace(base, offload="all", precision="fp16")
        simulate_step(shape, old, load_cluster("8xv100"), load_efficiency("v100"))
    with pytest.raises(ArgumentError, match="zero is 1"):
        replace(base, zero=1, offload="all")


def test_more_gpus_take_fewer_days() -> None:
    job = job_of(named_shape("llama-3-8b"), "8xh100", 256, 4096)
    found = sizes(FRAMEWORKS["lightning"], job, (1, 8, 16, 64), tokens=1e12, price_per_hour=2.0)
    assert found[0].best is None and "GB a GPU" in found[0].reason
    days = [size.days or 0.0 for size in found[1:]]
    assert days == sorted(days, reverse=True)
    for size in found[1:]:
        assert size.cost == pytest.approx(size.days * 24 * size.num_devices * 2.0)
        assert size.days * 86400 * size.best.time.tokens_per_second == pytest.approx(1e12)
    assert cluster_of(job.cluster, 16) == replace(load_cluster("2x8xh100"))
    with pytest.raises(ArgumentError, match="no whole number of nodes of 8"):
        cluster_of(job.cluster, 12)


def test_a_users_own_configuration_is_priced_beside() -> None:
    job = job_of(named_shape("llama-3-8b"), "8xh100", 64, 8192)
    framework = FRAMEWORKS["deepspeed"]
    text = json.dumps(
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "extra": [1]}
    )
    own, unread = read_own(framework, text, "ds.json", job.site)
    assert unread == ("extra",)
    found = advise(framework, job, own=own, where="ds.json")
    assert found.own is not None
    assert (found.own.config.zero, found.own.config.dp, found.own.config.num_microbatches) == (3, 8, 8)
    assert found.own.seconds >= found.ranking.best[0].seconds or not found.own.fits
    assert found.unlimited is not None and found.unlimited.seconds <= found.ranking.best[0].seconds
    with pytest.raises(ArgumentError, match=r"fully_shard .* has no configuration for small on 3 devices"):
        advise(FRAMEWORKS["fsdp"], job_of(SMALL, "3xh100", 2))


def test_words_and_names_that_are_not_known_are_errors() -> None:
    with pytest.raises(ArgumentError, match="--for ddp is not one of torchtitan"):
        framework_named("ddp")
    job = job_of()
    for words, message in (("tensor=2", "tensor is not one of"), ("tp=x", "no int"), ("tp=3", "do not divide 8")):
        for framework in FRAMEWORKS.values():
            with pytest.raises(AutoparError, match=message):
                read_own(framework, words, "", job.site)


def test_what_cannot_be_written_is_not_advised() -> None:
    """A precision that the file cannot ask for, and tensor parallel ranks of layers that the plan does not name."""
    with pytest.raises(ArgumentError, match=r"advice for torchtitan .* is for bf16, not for fp8"):
        rank(FRAMEWORKS["torchtitan"], replace(job_of(), precision="fp8"))
    assert rank(FRAMEWORKS["megatron"], replace(job_of(named_shape("llama-3-8b")), precision="fp8"), 1).best
    for name in ("fsdp", "lightning", "accelerate", "trainer"):
        degrees = [
            {layout.config.tp for layout in layouts(FRAMEWORKS[name], job_of(shape))}
            for shape in (SMALL, replace(SMALL, gated=False))
        ]
        assert max(degrees[0]) > 1 and degrees[1] == {1}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return int(exit_.value.code or 0), capsys.readouterr().out


def test_the_command_prints_advice_and_writes_what_to_paste(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "advise",
        "llama-3-8b",
        "--cluster",
        "8xh100",
        "--for",
        "deepspeed",
        "--global-batch",
        "64",
        "--seq",
        "4096",
    ]
    code, out = run(capsys, *given, "--config", "zero.json", "--json")
    assert code == 2 and "zero.json is no file" in json.loads(out)["error"]
    code, out = run(capsys, *given, "--out", str(tmp_path), "--gpus", "8,16", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["best"][0]["fits"] and answer["best"][0]["gigabytes"] < 80
    table = json.loads((tmp_path / "ds_config.json").read_text())
    assert table["zero_optimization"]["stage"] == answer["best"][0]["zero"]
    assert [size["gpus"] for size in answer["gpus"]] == [8, 16]
    (tmp_path / "model.py").write_text("x=1\n")
    code, out = run(capsys, *given, "--config", str(tmp_path / "model.py"), "--json")
    assert code == 2 and "Python, which is not run" in json.loads(out)["error"]
    code, out = run(capsys, *given, "--config", str(tmp_path), "--json")
    assert code == 2 and "is a folder" in json.loads(out)["error"]
    code, out = run(capsys, "advise", "model.py", *given[2:])
    assert code == 2
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "steps_per_print": 5}')
    code, out = run(capsys, *given, "--config", str(tmp_path / "ds.json"))
    assert code == 0 and "not modelled here, whatever it changes: steps_per_print of" in out
    code, out = run(capsys, *given, "--config", "tp=2,zero=3,mbs=1", "--json")
    yours = json.loads(out)["yours"]
    assert (yours["tp"], yours["dp"], yours["zero"], yours["accumulate"]) == (2, 4, 3, 16)
    code, out = run(capsys, *given)
    assert code == 0 and "GB a GPU" in out and "ds_config.json" in out


SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 8)
    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)

def make(batch=8):
    return Net(), {"x": torch.randn(batch, 64), "y": torch.randint(0, 8, (batch,))}
"""


def test_any_model_is_advised_by_its_plans(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    given = ["advise", f"{tmp_path / 'net.py'}:make", "--cluster", "2xh100", "--global-batch", "16", "--json"]
    code, out = run(capsys, *given, "--for", "trainer")
    answer = json.loads(out)
    assert code == 0 and {row["sharding"] for row in answer["best"]} >= {"DDP", "FSDP"}
    seconds = [row["step_seconds"] for row in answer["best"]]
    assert seconds == sorted(seconds) and all(row["micro_batch"] == 8 for row in answer["best"])
    arguments = json.loads(answer["written"]["training_arguments.json"])
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * 2 == 16
    assert arguments["bf16"] is True
    code, out = run(capsys, *given, "--for", "fsdp", "--precision", "fp32")
    code_of = json.loads(out)["written"]["distribute.py"]
    mine = {
        "fsdp": True,
        "bf16": True,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "gradient_accumulation_steps": 4,
    }
    (tmp_path / "mine.json").write_text(json.dumps(mine | {"torch_compile": True}))
    code, out = run(capsys, *given, "--for", "trainer", "--config", str(tmp_path / "mine.json"))
    yours = json.loads(out)["yours"]
    assert (yours["words"], yours["accumulate"]) == ("fsdp:zero=3,mbs=2", 4) and json.loads(out)["unread"] == [
        "torch_compile"
    ]
    fsdp = next(row for row in answer["best"] if row["sharding"] == "FSDP")
    assert yours["step_seconds"] > 0 and yours["memory_gb"]["parameters"] == fsdp["memory_gb"]["parameters"]
    assert code == 0 and "bfloat16" not in code_of
    for more, message in (
        (["--for", "megatron"], "transformers that it has itself"),
        (["--for", "trainer", "--gpus", "8"], "--gpus is for transformers"),
        (["--for", "trainer", "--config", "tp=2"], "your configuration has tensor"),
        (["--for", "fsdp", "--config", "dp=4,zero=3"], "is for 4 devices, the cluster has 2"),
        (["--for", "fsdp", "--config", "optimizer_states=5"], "has optimizer_states 5"),
        (["--for", "trainer", "--deadline", "3"], "--deadline needs --gpus and --tokens"),
    ):
        code, out = run(capsys, *given, *more)
        assert code == 2 and message in json.loads(out)["error"]


def test_what_does_not_fit_whole_is_tried_in_parts_then_recomputed() -> None:
    """Micro-batches go down by halves or more until one fits, first without recompute."""
    from autopar.api.advised import _largest

    def priced(limit: dict[str, int]):
        def price_of(size: int, kind: str):
            tried.append((size, kind))
            return type("Priced", (), {"fits": size <= limit[kind]})()

        return price_of

    for limit, last in (({"none": 12, "full": 48}, (12, "none")), ({"none": 0, "full": 5}, (3, "full"))):
        tried: list[tuple[int, str]] = []
        found = list(_largest(priced(limit), 48, ("none", "full")))
        assert [each.fits for each in found] == [False] * (len(found) - 1) + [True] and tried[-1] == last
        assert all(b[0] <= a[0] / 2 for a, b in pairwise(tried) if a[1] == b[1])


def test_the_layers_of_any_model_are_found_and_written() -> None:
    from torch import nn

    from autopar.api.advised import equal_layers

    class Block(nn.Linear):
        pass

    model = nn.Module()
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(Block(8, 8) for _ in range(3))
    model.head = nn.Sequential(Block(8, 8), Block(8, 8))
    model.small = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.mixed = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    assert equal_layers(model) == (("body.layers", "head"), "Block")
    assert equal_layers(nn.Linear(2, 2)) == ((), "")
    job = job_of()
    site = replace(job.site, layer_paths=("body.layers", "head"), layer_class="Block")
    config = TrainingConfig(dp=8, zero=3, micro_batch=1, global_batch=16, seq=4096, recompute="full")
    for name in ("trainer", "accelerate", "lightning", "fsdp"):
        framework = FRAMEWORKS[name]
        text = "".join(one.text for one in framework.write(site, config, framework.sharding_of(config)))
        assert ("body.layers" if name == "fsdp" else "Block") in text
