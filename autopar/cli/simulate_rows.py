"""What is asked of a simulation? A mapping of names to texts, from options or a row of a CSV, read and checked.

Columns: `model` (a name, or hf:config.json) or `layers, hidden, heads, vocab` with `kv_heads, ffn, gated`; `cluster`,
or `device` and `gpus` with `gpus_per_node` (8 unless said); the fields of `TrainingConfig`, of which `global_batch`,
`micro_batch` and `seq` are needed; `network_bandwidth`, bytes/s a device over the slowest links, where that was
measured. Short names (`vpp`, `mbs`, `sp`) are those of `training_config`. An empty cell is a column left out.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.training_config import ALIASES, TRUTH, TrainingConfig
from autopar.cost_models.transformer import READERS, TransformerShape, shape_from_config
from autopar.errors import ArgumentError, AutoparError
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.domains import Domain, checked_number

BANDWIDTH = Domain(whole=False, least=0, most=1e18, excluded=(0,), instead="it is measured, in bytes/s a device")
SIZES = ("layers", "hidden", "heads", "vocab")
SHAPE_FIELDS = (*SIZES, "kv_heads", "head_dim", "ffn", "gated")
CONFIG_FIELDS = {f.name: f.type for f in fields(TrainingConfig)}
NEEDED = ("global_batch", "micro_batch", "seq")
MACHINE = ("device", "gpus")
KNOWN = {"model", "cluster", *MACHINE, "gpus_per_node", "network_bandwidth", *SHAPE_FIELDS, *CONFIG_FIELDS}


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV under their own column names.

    Raises:
        ArgumentError: if it cannot be read, has no rows, or lacks a column that every row needs.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            columns = tuple(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    given = {ALIASES.get(column, column) for column in columns}
    missing = [name for name in NEEDED if name not in given]
    if "cluster" not in given and not given >= set(MACHINE):
        missing.append("cluster")
    if "model" not in given:
        missing += [name for name in SIZES if name not in given]
    if missing:
        raise ArgumentError(
            f"{path} has no column {', '.join(missing)}; it needs {', '.join(NEEDED)}, cluster (or "
            f"{', '.join(MACHINE)}) and model (or {', '.join(SIZES)}), "
            f"and knows {', '.join(sorted(KNOWN - set(NEEDED)))}"
        )
    if not rows:
        raise ArgumentError(f"{path} has a header and no rows")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ArgumentError(f"{path}, line {number}: {len(columns)} columns in the header, but not in this row")
    return rows


def read_row(row: Mapping[str, str], where: str) -> tuple[TransformerShape, TrainingConfig, Cluster]:
    """The shape, configuration and cluster that a row asks for; columns not known are left alone.

    Raises:
        AutoparError: the error of what is wrong, its message led by `where`.
    """
    values = {ALIASES.get(key, key): text.strip() for key, text in row.items() if text and text.strip()}
    try:
        for name in NEEDED:
            if name not in values:
                raise ArgumentError(f"{name} is empty")
        return _shape(values), _config(values), _cluster(values)
    except AutoparError as error:
        raise type(error)(f"{where}: {error}") from error


def has_shape(model: str) -> bool:
    """Whether the formulas of transformers know this model: a name, or a config.json of a known kind.

    Raises:
        ArgumentError: if there is no such config.json, or a Python file has no function.
    """
    if model.endswith(".py"):
        raise ArgumentError(f"{model} needs the function that makes the model: {model}:function")
    if not model.startswith("hf:"):
        return ":" not in model
    return _config_of(model.removeprefix("hf:"))[0].get("model_type") in READERS


def read_shape(model: str) -> TransformerShape:
    """The shape of a model by its name, or of hf:config.json.

    Raises:
        ArgumentError: if there is none such, or the config is of a model that has no shape here.
    """
    return _from_config(model.removeprefix("hf:")) if model.startswith("hf:") else named_shape(model)


def _shape(values: Mapping[str, str]) -> TransformerShape:
    if "model" in values and not all(name in values for name in SIZES):
        return read_shape(values["model"])
    missing = [name for name in SIZES if name not in values]
    if missing:
        raise ArgumentError(f"neither model nor {', '.join(missing)} is given")
    sizes = {name: _whole(values, name) for name in SHAPE_FIELDS if name in values and name != "gated"}
    hidden, heads = sizes["hidden"], sizes["heads"]
    return TransformerShape(
        name=values.get("model", "transformer"),
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        vocab=sizes["vocab"],
        kv_heads=sizes.get("kv_heads", heads),
        head_dim=sizes.get("head_dim", hidden // max(heads, 1)),
        ffn=sizes.get("ffn", 4 * hidden),
        gated=_truth(values, "gated") if "gated" in values else False,
    )


@lru_cache(maxsize=64)
def _from_config(text: str) -> TransformerShape:
    config, file = _config_of(text)
    return shape_from_config(config, str(file.parent.name or file.name))


def _config_of(text: str) -> tuple[dict[str, Any], Path]:
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{file} is no config.json that can be read: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{file} holds {type(config).__name__}, not a config")
    return config, file


def _config(values: Mapping[str, str]) -> TrainingConfig:
    given: dict[str, object] = {}
    for name, kind in CONFIG_FIELDS.items():
        if name in values:
            if kind is int:
                given[name] = _whole(values, name)
            else:
                given[name] = _truth(values, name) if kind is bool else values[name]
    return TrainingConfig(**given)  # type: ignore[arg-type]


def _cluster(values: Mapping[str, str]) -> Cluster:
    cluster = load_cluster(values["cluster"] if "cluster" in values else _preset(values))
    if "network_bandwidth" not in values:
        return cluster
    try:
        bandwidth = float(values["network_bandwidth"])
    except ValueError as error:
        raise ArgumentError(f"network_bandwidth {values['network_bandwidth']!r} is not a number") from error
    checked_number("network_bandwidth", bandwidth, BANDWIDTH)
    slowest = cluster.levels[0]
    # one line, as measured: the library's other protocols were fitted for other links
    measured = replace(
        slowest, bandwidth=bandwidth * slowest.devices_per_link, line_rate=None, lines=(), in_network=None, sources=()
    )
    return replace(cluster, levels=(measured, *cluster.levels[1:]))


def _preset(values: Mapping[str, str]) -> str:
    """The preset of as many devices: whole nodes, or a part of one."""
    for name in MACHINE:
        if name not in values:
            raise ArgumentError(f"cluster is empty, and so is {name}")
    gpus = _whole(values, "gpus")
    per_node = _whole(values, "gpus_per_node") if "gpus_per_node" in values else 8
    if per_node < 1 or (gpus > per_node and gpus % per_node):
        raise ArgumentError(f"gpus {gpus} are no whole number of nodes of {per_node}")
    if gpus <= per_node:
        return f"{gpus}x{values['device']}"
    return f"{gpus // per_node}x{per_node}x{values['device']}"


def _whole(values: Mapping[str, str], name: str) -> int:
    try:
        return int(values[name])
    except ValueError as error:
        raise ArgumentError(f"{name} {values[name]!r} is not a whole number") from error


def _truth(values: Mapping[str, str], name: str) -> bool:
    if values[name].lower() not in TRUTH:
        raise ArgumentError(f"{name} {values[name]!r} is neither true nor false")
    return TRUTH[values[name].lower()]
