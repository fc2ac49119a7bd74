"""Which machine is planned for? A cluster is one kind of device and its link levels, slowest first.

Ranks are numbered so that the last level's children are neighbours: on `64x8xh100` ranks 0-7 share a node. Every figure
carries its source; the presets' figures are the TOML files of `cost_models/hardware`.

    8xh100                     one node of 8 H100
    64x8xh100                  64 nodes of 8 H100
    cluster.toml               a file in the form of `TOML_FORM`, e.g. one that `cluster_toml` wrote
"""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.device import Device, LinkLevel
from autopar.errors import ClusterError

TOML_FORM = """\
name = "my cluster"
device = "h100"            # a preset, or a [device] table as in cost_models/hardware/h100.toml
[[levels]]                 # slowest level first
name = "infiniband"
size = 64                  # groups joined at this level: here nodes
alpha = 8e-6               # seconds a message, or { value = 8e-6, source = "where it comes from" }
bandwidth = 50e9           # bytes/s of one link in each direction
devices_per_link = 1       # devices that share the link (optional)
[[levels]]
name = "nvlink"
size = 8
alpha = 4e-6
bandwidth = 350e9
"""

PRESET = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<per_node>\d+)x(?P<device>[a-z][a-z0-9-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`levels` from the slowest (nodes) to the fastest (devices of one node)."""

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise ClusterError(f"cluster {self.name} has no link level; one device is one level of size 1")

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    def __str__(self) -> str:
        return self.name


def with_memory(cluster: Cluster, nbytes: int) -> Cluster:
    """The same cluster with `nbytes` of memory a device.

    Raises:
        ClusterError: if `nbytes` is not positive.
    """
    others = tuple((field, source) for field, source in cluster.device.sources if field != "memory_bytes")
    sources = (("memory_bytes", "given by the caller"), *others)
    device = dataclasses.replace(cluster.device, memory_bytes=nbytes, sources=sources)
    return dataclasses.replace(cluster, device=device)


def preset_devices() -> tuple[str, ...]:
    """Names of the devices that a preset may name."""
    folder = resources.files("autopar.cost_models") / "hardware"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


def load_cluster(text_or_path: str | Path) -> Cluster:
    """The cluster named by a preset text, or described by a TOML file.

    Raises:
        ClusterError: if the text is no preset and no file, or the file is not valid.
    """
    text = str(text_or_path)
    if isinstance(text_or_path, Path) or text.endswith(".toml") or Path(text).is_file():
        return _from_file(Path(text_or_path))
    match = PRESET.fullmatch(text.strip().lower())
    if match is None or match["device"] not in preset_devices():
        raise ClusterError(
            f"cluster {text!r} is neither a preset nor a TOML file. A preset is NODESxDEVICESxNAME or DEVICESxNAME "
            f"(64x8xh100, 8xh100) with NAME one of {', '.join(preset_devices())}; "
            f"a TOML file looks like this:\n{TOML_FORM}"
        )
    return _from_preset(text.strip().lower(), match)


def _from_preset(text: str, match: re.Match[str]) -> Cluster:
    hardware = _hardware(match["device"])
    where = f"preset {match['device']}"
    # The hardware file's levels are those of a whole cluster; one node needs only the last of them.
    sizes = [int(n) for n in (match["nodes"], match["per_node"]) if n is not None]
    tables = hardware["levels"]
    if len(sizes) > len(tables):
        raise ClusterError(
            f"cluster {text!r}: no link between nodes of {match['device']} is known; write {sizes[0] * sizes[1]}x"
            f"{match['device']} for one node, or describe the network in a TOML file:\n{TOML_FORM}"
        )
    levels = []
    for size, table in zip(sizes, tables[len(tables) - len(sizes) :], strict=True):
        fields = dict(table)
        limit = fields.pop("max_size", size)
        if not 1 <= size <= limit:
            raise ClusterError(
                f"cluster {text!r}: {fields['name']} joins 1 to {limit} {match['device']}, not {size}; "
                f"write the number of nodes in front, as in 2x{limit}x{match['device']}"
            )
        levels.append(_level(fields | {"size": size}, where))
    return Cluster(name=text, device=_device(hardware["device"], where), levels=tuple(levels))


def _from_file(path: Path) -> Cluster:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(
            f"cluster file {path} cannot be read: {error.strerror}; presets are 8xh100, 64x8xh100, ..."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"cluster file {path} is not TOML: {error}. It should look like this:\n{TOML_FORM}"
        ) from error
    where = str(path)
    _check_keys(document, {"name", "device", "levels"}, set(), where)
    device = document["device"]
    if isinstance(device, str):
        if device not in preset_devices():
            raise ClusterError(
                f"{where}: device {device!r} is not one of {', '.join(preset_devices())}; give a [device] table"
            )
        device = _hardware(device)["device"]
    if not isinstance(document["levels"], list):
        raise ClusterError(f"{where}: levels must be [[levels]] tables, slowest first:\n{TOML_FORM}")
    levels = tuple(_level(table, where) for table in document["levels"])
    return Cluster(name=_text(document, "name", where), device=_device(device, where), levels=levels)


def _hardware(name: str) -> dict[str, Any]:
    return tomllib.loads(
        (resources.files("autopar.cost_models") / "hardware" / f"{name}.toml").read_text(encoding="utf-8")
    )


def _device(table: Any, where: str) -> Device:
    where = f"{where}: [device]"
    scalars = ("memory_bytes", "memory_bandwidth", "launch_seconds", "efficiency")
    _check_keys(table, {"name", "peak_flops", *scalars}, set(), where)
    if not isinstance(table["peak_flops"], Mapping) or not table["peak_flops"]:
        raise ClusterError(
            f"{where}: peak_flops must be a table of flop/s by dtype, as in {{ bf16 = 989e12, fp32 = 67e12 }}"
        )
    values, sources = _figures(table, scalars, where)
    peaks, peak_sources = _figures(table["peak_flops"], tuple(table["peak_flops"]), f"{where} peak_flops")
    return Device(
        name=_text(table, "name", where),
        peak_flops=tuple(peaks.items()),
        memory_bytes=int(values["memory_bytes"]),
        memory_bandwidth=values["memory_bandwidth"],
        launch_seconds=values["launch_seconds"],
        efficiency=values["efficiency"],
        sources=sources + tuple((f"peak_flops.{dtype}", source) for dtype, source in peak_sources),
    )


def _level(table: Any, where: str) -> LinkLevel:
    where = f"{where}: [[levels]]"
    _check_keys(table, {"name", "size", "alpha", "bandwidth"}, {"devices_per_link"}, where)
    values, sources = _figures(table, ("alpha", "bandwidth", "devices_per_link"), where)
    counts = {"size": table["size"], "devices_per_link": values.get("devices_per_link", 1)}
    for key, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ClusterError(f"{where}: {key} {count!r} must be a whole number")
    return LinkLevel(
        name=_text(table, "name", where),
        size=table["size"],
        alpha=values["alpha"],
        bandwidth=values["bandwidth"],
        devices_per_link=int(counts["devices_per_link"]),
        sources=sources,
    )


def _figures(
    table: Mapping[str, Any], keys: tuple[str, ...], where: str
) -> tuple[dict[str, float], tuple[tuple[str, str], ...]]:
    """Values and sources of those of `keys` that the table has: a number, or `{ value, source }`."""
    values: dict[str, float] = {}
    sources: list[tuple[str, str]] = []
    for key in keys:
        if key not in table:
            continue
        figure = table[key]
        if isinstance(figure, Mapping):
            _check_keys(figure, {"value", "source"}, set(), f"{where} {key}")
            sources.append((key, _text(figure, "source", f"{where} {key}")))
            figure = figure["value"]
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ClusterError(f"{where}: {key} {figure!r} must be a number or {{ value = number, source = text }}")
        values[key] = figure
    return values, tuple(sources)


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str):
        raise ClusterError(f"{where}: {key} {value!r} must be text")
    return value


def _check_keys(table: Any, required: set[str], optional: set[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise ClusterError(f"{where} must be a table, not {table!r}; a cluster file looks like this:\n{TOML_FORM}")
    missing, unknown = sorted(required - set(table)), sorted(set(table) - required - optional)
    if missing or unknown:
        raise ClusterError(
            f"{where}: missing keys {', '.join(missing) or 'none'}; unknown keys {', '.join(unknown) or 'none'}; "
            f"a cluster file looks like this:\n{TOML_FORM}"
        )


def cluster_toml(cluster: Cluster) -> str:
    """The cluster as a file that `load_cluster` reads back as an equal value."""
    device, sources = cluster.device, dict(cluster.device.sources)
    lines = [f"name = {_quote(cluster.name)}", "", "[device]", f"name = {_quote(device.name)}"]
    for field in ("memory_bytes", "memory_bandwidth", "launch_seconds", "efficiency"):
        lines.append(f"{field} = {_figure(getattr(device, field), sources.get(field))}")
    lines += ["", "[device.peak_flops]"]
    lines += [f"{_quote(k)} = {_figure(v, sources.get(f'peak_flops.{k}'))}" for k, v in device.peak_flops]
    for level in cluster.levels:
        sources = dict(level.sources)
        lines += ["", "[[levels]]", f"name = {_quote(level.name)}", f"size = {level.size}"]
        for field in ("alpha", "bandwidth", "devices_per_link"):
            lines.append(f"{field} = {_figure(getattr(level, field), sources.get(field))}")
    return "\n".join(lines) + "\n"


def _figure(value: float, source: str | None) -> str:
    return repr(value) if source is None else f"{{ value = {value!r}, source = {_quote(source)} }}"


def _quote(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
