"""What `autopar advise` writes is read by the frameworks themselves, and torch's runs to one process's losses.

Frameworks that are not installed are skipped: `make integrations` installs those that install everywhere.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path

import pytest

from autopar.advice.candidates import layouts, micro_batches, offloads
from autopar.advice.framework import ConfigFile, Framework, TransformerJob
from autopar.advice.frameworks import FRAMEWORKS
from autopar.cost_models.named_shapes import named_shape
from autopar.values.cluster import load_cluster

JOB = TransformerJob(shape=named_shape("llama-3-8b"), cluster=load_cluster("4x8xh100"), global_batch=64, seq=8192)


def written(framework: Framework, job: TransformerJob = JOB) -> list[tuple[ConfigFile, ...]]:
    """One of each kind of configuration: policy, degrees above 1, recompute, schedule."""
    found = {}
    for layout in layouts(framework, job):
        for size in micro_batches(layout):
            for kind, offload in product(framework.space.recompute, offloads(framework, job, layout)):
                c = replace(layout.config, micro_batch=size, recompute=kind, offload=offload)
                key = (
                    layout.sharding,
                    c.tp > 1,
                    c.pp > 1,
                    c.cp > 1,
                    c.ep > 1,
                    kind,
                    offload,
                    c.virtual_stages > 1,
                    c.schedule,
                )
                found.setdefault(key, framework.write(job.site, c, layout.sharding))
    return list(found.values())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.filterwarnings("ignore")
def test_accelerate_reads_its_file(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    for number, (file, _) in enumerate(written(FRAMEWORKS["accelerate"])):
        path.write_text(file.text)
        assert load_config_from_file(str(path)).num_processes == 32
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
        with pytest.MonkeyPatch.context() as patched:
            for key, value in prepare_multi_gpu_env(args).items():
                patched.setenv(key, value)
            if "fsdp_config" in file.text:
                plugin = FullyShardedDataParallelPlugin()
                assert plugin.fsdp_version == 2
                assert plugin.reshard_after_forward == ("fsdp_reshard_after_forward: true" in file.text)
                assert plugin.activation_checkpointing == ("fsdp_activation_checkpointing: true" in file.text)
            if "parallelism_config" in file.text:
                assert ParallelismConfig().total_size == 32, number


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_reads_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    pytest.importorskip("transformers", reason="pip install transformers")
    monkeypatch.chdir(tmp_path)
    for arguments, script, _ in written(FRAMEWORKS["trainer"]):
        table = json.loads(arguments.text) | {"use_cpu": True}  # no GPU here
        (tmp_path / "training_arguments.json").write_text(json.dumps(table))
        said: dict[str, object] = {}
        exec(script.text, said)
        assert said["args"].per_device_train_batch_size == table["per_device_train_batch_size"]


def test_deepspeed_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="pip install deepspeed", exc_type=ImportError)
    for file, *_ in written(FRAMEWORKS["deepspeed"]):
        table = json.loads(file.text)
        ranks = 32 // table.get("tensor_parallel", {}).get("autotp_size", 1)
        monkeypatch.setattr(config.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(config.dist, "get_world_size", lambda *_, ranks=ranks: ranks)
        monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
        read = config.DeepSpeedConfig(table)
        assert read.train_batch_size == 64
        assert read.zero_config.stage == table["zero_optimization"]["stage"]


@pytest.mark.filterwarnings("ignore")
def test_lightning_makes_its_strategies() -> None:
    pytest.importorskip("lightning", reason="pip install lightning")
    import torch

    for (file,) in written(FRAMEWORKS["lightning"]):
        head, _, rest = file.text.partition("trainer = ")  # a Trainer of FSDP refuses to be made without a GPU
        strategy = next(line.strip() for line in rest.splitlines() if "strategy=" in line)
        said: dict[str, object] = {"DecoderLayer": torch.nn.Linear}
        exec(head + strategy.rstrip(","), said)
        assert type(said["strategy"]).__name__ in strategy


def test_torchtitan_parses_its_command_line() -> None:
    """Its config dataclasses and its parser; the whole package wants a GPU's compiler to be imported."""
    pytest.importorskip("torchtitan", reason="pip install --no-deps torchtitan tyro")
    tyro = pytest.importorskip("tyro", reason="pip install tyro")
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC

    @dataclass
    class Config:
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        compile: CompileConfig = field(default_factory=CompileConfig)
        activation_checkpoint: ActivationCheckpointingConfig = field(default_factory=SelectiveAC.Config)

    for (command,) in written(FRAMEWORKS["torchtitan"]):
        words = shlex.split(command.text.replace("\\\n", " "))
        words = words[words.index("torchtitan.train") + 1 :]
        assert words[:4] == ["--module", "llama3", "--config", "llama3_8b"]
        read = tyro.cli(Config, args=words[4:], default=Config())
        p = read.parallelism
        ranks = p.data_parallel_replicate_degree * p.data_parallel_shard_degree * p.tensor_parallel_degree
        assert ranks * p.context_parallel_degree * p.pipeline_parallel_degree == 32
        assert read.training.local_batch_size % p.pipeline_parallel_microbatch_size == 0


# 30 layers in 4 stages: the embedding and the loss count as a layer each
EXPERTS = replace(JOB, shape=replace(JOB.shape, name="experts", layers=30, experts=8, experts_per_token=2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("job", [JOB, EXPERTS], ids=["dense", "experts"])
def test_megatron_makes_its_configs(job: TransformerJob) -> None:
    """Of Megatron-LM only its core is a package: most of its arguments are fields of the core's configs, which check
    them; what is left is named in `TRAINING`."""
    core = pytest.importorskip("megatron.core.transformer", reason="pip install --no-deps megatron-core")
    from megatron.core.distributed import DistributedDataParallelConfig

    renamed = {"fp8_format": "fp8", "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size"}
    exchange = {f.name for f in fields(DistributedDataParallelConfig)}
    shape = job.shape
    for (command,) in written(FRAMEWORKS["megatron"], job):
        words = command.text.replace("\\\n", " ").partition("pretrain_gpt.py")[2].split("--")[1:]
        flags = {key.replace("-", "_"): value for key, _, value in (word.strip().partition(" ") for word in words)}
        given: dict[str, object] = {
            renamed.get(key, key): int(value) if value.isdecimal() else value or True
            for key, value in flags.items()
            if key not in TRAINING
        }
        DistributedDataParallelConfig(**{key: given.pop(key) for key in exchange & given.keys()})
        config = core.TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            add_bias_linear=shape.linear_bias,
            num_moe_experts=shape.experts if shape.experts > 1 else None,
            pipeline_dtype="bf16",
            **given,
        )
        ranks = config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
        parts, left = divmod(job.global_batch * ranks, int(flags["micro_batch_size"]) * job.cluster.num_devices)
        assert not left and parts >= config.pipeline_model_parallel_size


TRAINING = {"micro_batch_size", "global_batch_size", "seq_length"}

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
ids = torch.randint(0, 128, (3, 8, 16))
parts, index = 1, 0
if len(sys.argv) > 1:
    dist.init_process_group("gloo")
    said = {}
    source = open(sys.argv[1]).read().replace("torch.bfloat16", "torch.float32")  # losses to 1e-6
    exec(source, said)
    assert said["MICRO_BATCH"] * said["ACCUMULATE"] * int(sys.argv[2]) == 8
    model = said["distribute"](model, "cpu")
    parts = int(sys.argv[2])
    index = dist.get_rank() * parts // dist.get_world_size()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in ids:
    own = batch.chunk(parts)[index]
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if parts > 1 or dist.is_initialized():
        dist.all_reduce(loss := loss.detach().clone())
        loss /= dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("loss", loss.item())
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.skipif("AUTOPAR_INTEGRATIONS" not in os.environ, reason="ten runs of four processes: make integrations")
@pytest.mark.parametrize("kind", ["FSDP", "FSDP recomputed", "HSDP", "DDP", "FSDP with tp"])
def test_torchs_code_trains_to_the_losses_of_one_process(kind: str, tmp_path: Path) -> None:
    """Each kind of function on 4 Gloo ranks, as it is written but for bf16."""
    framework = FRAMEWORKS["fsdp"]
    shape = replace(JOB.shape, name="tiny", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=128)
    job = TransformerJob(shape=shape, cluster=load_cluster("4xh100"), global_batch=8, seq=16)
    tp = 2 if "tp" in kind else 1
    layout = next(
        layout
        for layout in layouts(framework, job)
        if layout.sharding.name == kind.split()[0] and layout.config.tp == tp
    )
    config = layout.config
    config = replace(config, micro_batch=8 // config.dp, recompute="full" if "recomputed" in kind else "none")
    (tmp_path / "distribute.py").write_text(framework.write(job.site, config, layout.sharding)[0].text)
    (tmp_path / "train.py").write_text(TRAIN)

    def losses(*command: str) -> list[float]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]

    alone = losses("train.py")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py")
    assert losses(*launch, "distribute.py", str(config.dp)) == pytest.approx(alone, rel=1e-6) and len(alone) == 3
