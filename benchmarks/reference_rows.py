"""What does a row of a published measurement say? A shape, a configuration, a cluster, and what was measured.

Columns are read as printed; what a source leaves open is filled in by the tables below, one entry a source, each with
its reason. A row that stays open (no layers, heads or degrees) or that its own note marks as contradictory is counted
and left out. Nothing here looks at the measured figures, but to read them.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.cost_models.step_work import check_devices
from autopar.cost_models.training_config import RECOMPUTE, TrainingConfig, check_fits
from autopar.cost_models.transformer import TransformerShape, hardware_flops, model_flops
from autopar.errors import AutoparError
from autopar.values.cluster import Cluster, load_cluster

# source key -> (how its `source` column begins, how its software works where the row does not say)
# Megatron-LM before 2023 keeps attention scores and fuses their softmax; it exchanges gradients after backward. SC'21
# and DeepSpeed's fp16 sum gradients in 16 bit; selective recompute came with sequence parallelism (Korthikanti et al.),
# whose figure 1 has 18 bytes a parameter: float32 gradients. Zero-bubble's printed sizes (14.6B, 28.3B) fit a
# vocabulary of 25k to 33k only, and its tokenizer is a SentencePiece model: 32,000.
MEGATRON_2022 = {"main_grads": True, "fused_grad_sum": True, "overlap_tensor": "backward"}
# The section "dealing with JZ hanging" leaves CUDA_LAUNCH_BLOCKING=1 on; DeepSpeed's pipeline sends whole gradients
# (is_grad_partitioned = False); 250k words are padded to 250,880.
BLOOM = {
    "attention": "fused",
    "main_grads": False,
    "vocab": 250880,
    "zero": 1,
    "split_pipe_gradients": False,
    "blocking_launches": True,
}
# The authors' library as published, Aleph-Alpha/scaling at 7848929: 16-bit gradients are summed in float32
# (optimizer/allreduce.py), whole, before ZeRO-1 takes its part (optimizer.py); stages hand on whole activations and
# gradients (communicator.py); gate and up are two column-parallel products, each with its own all-reduce (mlp.py,
# linear/utils.py); gathered inputs are kept (rms_norm.py) and logits gathered (lm_head.py).
ALEPH_ALPHA = {
    "main_grads": False, "zero": 1, "fusion": "none", "gathered_logits": True, "in_place_loss": False,
    "separate_gate": True, "split_pipe_activations": False, "split_pipe_gradients": False, "whole_gradients": True,
    "float32_exchange": True, "regather_inputs": False,
}  # fmt: skip
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "SC'21": ("arXiv:2104.04473", {"attention": "fused", "main_grads": False, "recompute": "full"}),
    "Korthikanti": ("arXiv:2205.05198", {"attention": "fused", **MEGATRON_2022}),
    "MegaScale": (
        "arXiv:2402.15627",
        {"attention": "fused", "sequence_parallel": True, "recompute": "selective", "zero": 1, **MEGATRON_2022},
    ),
    "Zero-bubble": ("arXiv:2401.10241", {"attention": "fused", "vocab": 32000, **MEGATRON_2022}),
    "Megatron-LM README": (
        "github:NVIDIA/Megatron-LM",
        {**MEGATRON_2022, "sequence_parallel": True, "zero": 1, "overlap_data": True, "overlap_tensor": "all"},
    ),
    "BLOOM": ("github:bigscience-workshop", BLOOM),
    "LLaMA layouts": ("github:Aleph-Alpha", ALEPH_ALPHA),
    "torchtitan": (
        "github:pytorch/torchtitan",
        {"zero": 3, "overlap_data": True, "fusion": "norm", "in_place_loss": False},
    ),
}
GPT = {"linear_bias": True, "qkv_bias": True, "norm_vectors": 2, "dropout": True, "tied": True}
LLAMA = {"gated": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement; `seconds` or `peak_bytes` are None where the row prints none."""

    id: str
    source: str
    stack: str
    gpu: str
    shape: TransformerShape
    config: TrainingConfig
    cluster: Cluster
    seconds: float | None
    peak_bytes: float | None
    peak_kind: str
    out_of_memory: bool
    ok: bool
    group: tuple[object, ...]
    choices: tuple[TrainingConfig, ...] = ()


@dataclass(slots=True)
class Reading:
    """Cases of a folder and why other rows were left out."""

    cases: list[Case] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def read_folder(folder: Path) -> Reading:
    """Every file that has the columns of a dense model's layout measurement, in order of name.

    Files that also describe experts, long contexts and newer GPUs (a column `experts`) are not read: their rows say
    more than a `TransformerShape` holds.
    """
    reading = Reading()
    for file in sorted(folder.glob("*.csv")):
        with file.open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            names = set(table.fieldnames or ())
            if not {"step_time_s", "tp", "pp", "hidden", "hardware"} <= names or "experts" in names:
                continue
            for row in table:
                _read(row, file.stem, reading)
    return reading


def _read(row: Mapping[str, str], file: str, reading: Reading) -> None:
    reason = _why_not(row)
    if reason is None:
        try:
            reading.cases.append(_case(row, file))
            return
        except AutoparError as error:
            reason = f"not a configuration: {str(error)[:80]}"
        except ValueError as error:
            reason = f"a cell that is no number: {str(error)[:60]}"
    reading.left_out.setdefault(reason, []).append(row["id"])


def _why_not(row: Mapping[str, str]) -> str | None:
    if row["status"] not in ("ok", "OOM"):
        return "no result"
    note = row["note"]
    # torchtitan's CHECK notes are about its MFU column, which is not read
    if "CHECK" in note and "recomputed MFU" not in note:
        return "the row contradicts itself (CHECK)"
    for column in ("layers", "hidden", "heads", "tp", "pp", "gpus", "global_batch"):
        if not row[column]:
            return f"{column} not stated"
    if "MegaScale:" in row["method"] or row["method"] in ("MegaScale",) or row["method"].startswith("+ "):
        return "another model (parallel block, sliding window)"
    if "async=no" in note:
        return "a debugging run (CUDA_LAUNCH_BLOCKING)"
    if "before the 02-21 fix" in note and not row["step_time_s"]:
        return "flops counted by a formula the source retracts"
    return None


def source_of(row: Mapping[str, str], file: str) -> tuple[str, dict[str, Any]]:
    """The key of the row's source and its software's habits; an unknown source is its file, with the defaults."""
    if row["source"].startswith("arXiv:2104.04473") and "DeepSpeed" in row["sharding"]:
        # the paper's baseline is other software: Megatron's kernels, parameters gathered by DeepSpeed
        return "SC'21, DeepSpeed", {**SOURCES["SC'21"][1], "deepspeed_zero3": True, "overlap_data": False}
    if row["source"].startswith("github:NVIDIA/Megatron-LM") and "Selene" in row["hardware"]:
        return "Megatron-LM README A100", dict(SOURCES["SC'21"][1])
    for key, (start, habits) in SOURCES.items():
        if row["source"].startswith(start):
            return key, dict(habits)
    return row["source"].split(",")[0].split(":L")[0] or file, {}


def _case(row: Mapping[str, str], file: str) -> Case:
    source, habits = source_of(row, file)
    gpu, cluster = _cluster(row)
    if source == "torchtitan":
        source = f"torchtitan {gpu.upper()} {row['source'].rsplit('/', 1)[-1].split('_')[0].split('.md')[0]}"
    vocab = habits.pop("vocab", None)
    shape = _shape(row, vocab)
    config, choices = _config(row, habits)
    check_fits(shape, config)
    check_devices(config, cluster)
    flops_seconds = _seconds(row, source, shape, config)
    peak = (
        float(row["peak_mem"]) * {"GiB": 2**30}.get(row["peak_mem_unit"].split(" ")[0], 1e9)
        if row["peak_mem"]
        else None
    )
    return Case(
        id=row["id"],
        source=source,
        stack=_stack(source, row),
        gpu=gpu,
        shape=shape,
        config=config,
        choices=choices,
        cluster=cluster,
        seconds=flops_seconds if row["status"] == "ok" else None,
        peak_bytes=peak if row["status"] == "ok" else None,
        peak_kind=_quantity(row),
        out_of_memory=row["status"] == "OOM",
        ok=row["status"] == "ok",
        group=(
            source, row["layers"], row["hidden"], row["heads"], row["seq"], row["gpus"], row["global_batch"],
            row["precision"], row["method"] if "attention kernel" in row["method"] else "",
            re.sub(r".*section (\"[^\"]*\").*", r"\1", row["note"]) if source == "BLOOM" else "",
        ),
    )  # fmt: skip


def _stack(source: str, row: Mapping[str, str]) -> str:
    """Whose software, and which of its variants where the row names one: kernels, compiler, precision. The BLOOM
    chronicle says on 25 February: "A100s PCI-Express/NUMA was improved today [...] do not compare today's numbers to
    yesterday's"; those are two machines.
    """
    if source.startswith("torchtitan"):
        return f"{source}, {'compiled' if 'compile' in row['method'] else 'eager'}, {_precision(row)}"
    if source == "LLaMA layouts":
        return f"{source}, {row['method'].removeprefix('attention kernel: ')}"
    if source == "BLOOM":
        day = re.search(r"date (\d\d-\d\d)", row["note"])
        return f"{source}, {'new' if day and day.group(1) >= '02-25' else 'old'} PCIe, {_precision(row)}"
    return source


def _quantity(row: Mapping[str, str]) -> str:
    """Which of the three quantities that are called memory the row prints."""
    text = f"{row['peak_mem_kind']} {row['peak_mem_unit']}"
    if "nvidia-smi" in text:
        return "nvidia-smi"
    return "reserved" if "reported" in text or "reserved" in text else "allocated"


def _shape(row: Mapping[str, str], vocab: int | None) -> TransformerShape:
    heads, hidden = int(row["heads"]), int(row["hidden"])
    llama = "llama" in row["model"].lower() or "qwen" in row["model"].lower() or "mistral" in row["model"].lower()
    text = row["vocab"]
    size = vocab or (int(text.rstrip("k").replace(",", "")) * (1000 if text.endswith("k") else 1) if text else 50304)
    return TransformerShape(
        name=row["model"],
        layers=int(row["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(row["kv_heads"] or heads),
        head_dim=hidden // heads,
        ffn=int(row["ffn"] or 4 * hidden),
        vocab=size,
        positions=0 if llama else int(row["seq"]),
        **(LLAMA if llama else GPT),
    )


def _cluster(row: Mapping[str, str]) -> tuple[str, Cluster]:
    text = row["hardware"]
    found = re.search(r"(A100|H100|H200|B200|V100)", text)
    gpu = found.group(1).lower() if found else ("a100" if "Ampere" in text else text.lower())
    if gpu == "a100" and "40GB" in text:
        gpu = "a100-40gb"
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"] or 8)
    nodes = gpus // per_node
    cluster = load_cluster(f"{gpus}x{gpu}" if gpus <= per_node else f"{nodes}x{per_node}x{gpu}")
    device = cluster.device
    bandwidth, watts = re.search(r"([\d.]+) TB/s", text), re.search(r"(\d+) W limit", text)
    if bandwidth:
        device = replace(device, memory_bandwidth=float(bandwidth.group(1)) * 1e12)
    if size := re.search(r"(\d+)GB HBM", text):
        device = replace(device, memory_bytes=int(size.group(1)) * 10**9)
    if watts and gpu == "h100":
        # Power goes with frequency times voltage squared, so about with its cube; 700 W is the part's own limit.
        slower = (float(watts.group(1)) / 700) ** (1 / 3)
        device = replace(device, peak_flops=tuple((dtype, peak * slower) for dtype, peak in device.peak_flops))
    levels = cluster.levels
    if "4 Omni-Path" in row["interconnect"] and len(levels) == 2:
        # 100 Gb/s a link, four links for eight GPUs
        links = replace(levels[0], bandwidth=12.5e9, devices_per_link=2, line_rate=None, lines=(), in_network=None)
        levels = (links, levels[1])
    return gpu, replace(cluster, device=device, levels=levels)


def _config(row: Mapping[str, str], habits: dict[str, Any]) -> tuple[TrainingConfig, tuple[TrainingConfig, ...]]:
    """The configuration, and the candidates where the row leaves micro-batch or virtual stages open."""
    method, gpus = row["method"], int(row["gpus"])
    tp, pp, cp, ep = (int(row[key] or 1) for key in ("tp", "pp", "cp", "ep"))
    dp = int(row["dp"]) if row["dp"] else gpus // (tp * pp * cp)
    fields = {**habits, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp}
    fields |= {"seq": int(row["seq"]), "global_batch": int(row["global_batch"])}
    if row["sequence_parallel"]:
        fields["sequence_parallel"] = row["sequence_parallel"] == "1"
    fields["precision"] = _precision(row)
    if row["recompute"] and "stated" not in row["recompute"]:
        fields["recompute"] = _recompute(row["recompute"])
    fields |= _sharding(row["sharding"], habits)
    if "fp32 grad accumulation" in row["note"]:
        fields["main_grads"] = True
        fields["whole_gradients"] = fields["zero"] == 1  # DeepSpeed's PipelineEngine, _bf16_reduce_grads
    fields |= _habits_of_method(method)
    if "zero-bubble" in row["source"] or method in ("ZB-1p", "ZB-2p"):
        fields["schedule"] = method.lower()
    vpp = row["vpp"]
    if pp > 1 and vpp.isdigit():
        fields["virtual_stages"] = int(vpp)
    elif pp > 1 and "layer per chunk" in vpp:
        fields["virtual_stages"] = -(-int(row["layers"]) // pp)
    elif pp > 1 and "Interleaved" in method:
        fields["virtual_stages"] = 2
    per_rank = fields["global_batch"] // dp
    if row["microbatch"]:
        return TrainingConfig(micro_batch=int(row["microbatch"]), **fields), ()
    if "torchtitan" in row["source"]:
        # its default is as many micro-batches as stages
        return TrainingConfig(micro_batch=max(1, per_rank // pp), **fields), ()
    if row["source"].startswith("arXiv:2402.15627"):
        return TrainingConfig(micro_batch=1, **fields), ()
    chunks: list[int | None] = [None]
    if pp > 1 and not vpp and int(row["layers"]) % pp == 0:
        each = int(row["layers"]) // pp
        chunks = [v for v in range(1, each + 1) if each % v == 0]
    options = [
        TrainingConfig(micro_batch=size, **{**fields, **({"virtual_stages": v} if v else {})})
        for size in (1, 2, 4)
        if per_rank % size == 0
        for v in chunks
    ]
    return options[0], tuple(options)


def _sharding(text: str, habits: Mapping[str, Any]) -> dict[str, Any]:
    """What the sharding column says; a column left empty leaves the source's habit."""
    stages = {"ZeRO-0": 0, "none": 0, "ZeRO-1": 1, "distributed optimizer": 1, "ZeRO-2": 2, "ZeRO-3": 3, "FSDP": 3}
    for name, zero in stages.items():
        if text == name or (name != "none" and name in text):
            return {"zero": zero, "overlap_data": habits.get("overlap_data", zero == 3)}
    return {}


def _precision(row: Mapping[str, str]) -> str:
    text = row["precision"].lower()
    if "rowwise" in text:
        return "fp8-rowwise"
    if "float8" in text or "fp8" in text:
        return "fp8"
    return "fp16" if text.startswith(("fp16", "16-bit")) else "bf16"


def _recompute(text: str) -> str:
    if text.startswith("selective (op)") or text.startswith("selective op"):
        return "op"
    if text.startswith("selective layer"):
        return "alternate"
    word = text.lower().split(" ")[0].strip(",;")
    if word in RECOMPUTE:
        return word
    return "none" if word in ("no", "off", "false", "0") else "full"


def _habits_of_method(method: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kernel in (
        ("flash_attention2", "flash"),
        ("flash_attentionv1", "flash1"),
        ("fused", "fused"),
        ("torch", "unfused"),
    ):
        if method.startswith(f"attention kernel: {name}"):
            found["attention"] = kernel
            break
    if "RMS kernel" in method:
        found["fusion"] = "norm"
    if "torch.compile" in method:
        found["fusion"] = "all"
    if "AsyncTP" in method or "async TP" in method.replace("Async TP", "async TP"):
        found["overlap_tensor"] = "all"
    return found


def _seconds(row: Mapping[str, str], source: str, shape: TransformerShape, config: TrainingConfig) -> float | None:
    """Seconds of a step: printed, or from the flop rate printed, by the convention that the source states."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    tokens, gpus = config.global_batch * config.seq, int(row["gpus"])
    for column, work in (
        ("tokens_per_s", tokens),
        ("tokens_per_s_per_gpu", tokens / gpus),
        ("samples_per_s", config.global_batch),
    ):
        if row[column]:
            return work / float(row[column])
    if row["tflops_per_gpu"]:
        hardware = row["tflops_kind"].startswith("hardware") or source == "SC'21"
        flops = (
            hardware_flops(shape, tokens, config.seq)
            if hardware
            else model_flops(shape, tokens, config.seq, causal=False)
        )
        return flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    if row["mfu_pct"]:
        # Korthikanti, MegaScale: attention is not halved
        peak = load_cluster(
            "8xa100" if "A100" in row["hardware"] or "Ampere" in row["hardware"] else "8xh100"
        ).device.peak("bf16")
        return model_flops(shape, tokens, config.seq, causal=False) / (float(row["mfu_pct"]) / 100 * peak * gpus)
    return None


def groups(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases of the same task in several layouts: at least two layouts with a time."""
    by_key: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        if case.seconds is not None:
            by_key.setdefault(case.group, []).append(case)
    for members in by_key.values():
        if len({c.config for c in members}) > 1:
            yield members
