"""What a user's own configuration says is read as its framework means it, or refused."""

import pytest

from autopar.advice.advise import read_own
from autopar.advice.config_file import flat_keys
from autopar.advice.frameworks import FRAMEWORKS
from autopar.errors import ArgumentError, AutoparError
from tests.test_advice import job_of


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("{", "a.json", "no JSON that can be read"),
        ("[1]", "a.json", "a table is expected"),
        ("a = ", "a.toml", "no TOML"),
        ("hello", "run.sh", "neither flags"),
        ("--a 'x", "run.sh", "cannot be read as flags"),
        ("x" * 2_000_000, "a.json", "at most"),
    ],
)
def test_a_file_that_is_none_is_an_error(text: str, name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flat_keys(text, name)


@pytest.mark.parametrize(
    ("framework", "name", "text", "message"),
    [
        ("deepspeed", "a.json", '{"zero_optimisation": {"stage": 3}}', "did you mean zero_optimization.stage"),
        ("deepspeed", "a.json", '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, '
         '"gradient_accumulation_steps": 1}', "train_batch_size is 7, but 8 data-parallel ranks"),
        ("deepspeed", "a.json", '{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "nvme is not priced"),
        ("deepspeed", "a.json", '{"scheduler": {"type": "WarmupLR"}}', "no option that is known"),
        ("deepspeed", "a.json", '{"tensor_parallel": {"autotp_size": 3}}', "do not divide 8"),
        ("trainer", "a.json", '{"fsdp": "full_shrd"}', "fsdp full_shrd is not priced here"),
        ("trainer", "a.json", '{"bf16": "maybe"}', "bf16 maybe is not priced here"),
        ("trainer", "a.json", '{"per_device_train_batchsize": 2}', "did you mean per_device_train_batch_size"),
        ("trainer", "a.json", '{"deepspeed": "ds.json"}', "give --for deepspeed"),
        ("trainer", "a.json", '{"bf16": true, "fp16": true}', "bf16 and fp16 are both on"),
        ("trainer", "a.json", '{"gradient_accumulation_steps": 0}', "steps is 0; it is at least 1"),
        ("trainer", "a.json", '{"optim": "adamw_torchh"}', "did you mean adamw_torch"),
        ("trainer", "a.json", '{"fsdp": true, "fsdp_config": {"transformer_layer_class_to_wrap": "X"}}',
         "did you mean fsdp_config.transformer_layer_cls_to_wrap"),
        ("fsdp", "a.yaml", "zro: 3", "did you mean zero"),
        ("accelerate", "a.yaml", "distributed_type: TPU", "distributed_type TPU is not priced here"),
        ("accelerate", "a.yaml", "mixed_precision: fp8", "mixed_precision fp8 is not priced here"),
        ("torchtitan", "a.sh", "--parallelism.pipeline_parallel_schedule LoopedBFS", "LoopedBFS is not priced here"),
        ("torchtitan", "a.toml", '[activation_checkpoint]\nmode = "memory_budget"', "memory_budget is not priced here"),
        ("torchtitan", "a.toml", "[parallelism]\ntensor_parallel_degre = 2", "did you mean parallelism.tensor"),
        ("megatron", "a.sh", "--recompute-granularity most", "recompute-granularity most is not priced here"),
        ("megatron", "a.sh", "--tensor-model-parallel-size $TP", "not a whole number"),
        ("fsdp", "train.py", "x = 1", "Python, which is not run"),
        ("lightning", "train.py", "x = 1", "Python, which is not run"),
    ],
)  # fmt: skip
def test_what_a_file_says_is_read_or_refused(framework: str, name: str, text: str, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        read_own(FRAMEWORKS[framework], text, name, job_of().site)


@pytest.mark.parametrize(
    ("framework", "name", "text", "said"),
    [
        ("trainer", "a.json", '{"bf16": true, "fsdp": "shard_grad_op auto_wrap offload"}',
         {"precision": "bf16", "zero": 3, "keep_gathered": True, "offload": "all"}),
        ("trainer", "a.json", '{"fsdp": ["hybrid_shard"]}', {"precision": "fp32", "zero": 3, "replicate": 2}),
        ("trainer", "a.json", '{"fsdp": true, "fsdp_config": {"reshard_after_forward": false}}',
         {"zero": 3, "keep_gathered": True}),
        ("trainer", "a.json", '{"fsdp": "", "fp16": true}', {"zero": 0, "precision": "fp16"}),
        ("accelerate", "a.yaml", "mixed_precision: no\ndistributed_type: 'NO'", {"precision": "fp32", "zero": 0}),
        ("accelerate", "a.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 4",
         {"zero": 3, "replicate": 2}),
        ("deepspeed", "a.json", '{"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": true}}',
         {"precision": "fp16", "micro_batch": 1}),
        ("megatron", "a.sh", "--bf16 --fp8-format hybrid --recompute-activations",
         {"precision": "fp8", "recompute": "selective"}),
        ("torchtitan", "a.toml", '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"',
         {"recompute": "alternate", "precision": "bf16"}),
        ("trainer", "a.json", '{"optim": "lion_32bit"}', {"optimizer_states": 1}),
        ("megatron", "a.sh", "--tp-comm-overlap-ag 1 --recompute-granularity full", {"recompute": "full"}),
        ("fsdp", "a.yaml", "tp: 2\nzero: 3", {"tp": 2, "zero": 3, "dp": 8}),
    ],
)  # fmt: skip
def test_files_of_other_hands_mean_what_their_frameworks_do_with_them(
    framework: str, name: str, text: str, said: dict[str, object]
) -> None:
    fields_, _ = read_own(FRAMEWORKS[framework], text, name, job_of(cluster="2x8xh100").site)
    assert {key: fields_[key] for key in said} == said
