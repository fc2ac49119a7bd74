"""Which machine is planned for? A cluster is one kind of device and its link levels, slowest first.

Ranks are numbered so that the last level's children are neighbours: on `64x8xh100` ranks 0-7 share a node. Every figure
carries its source; the presets' figures are the TOML files of `cost_models/hardware`.

    8xh100                     one node of 8 H100
    64x8xh100                  64 nodes of 8 H100
    8x4xrtx2080ti@10gbe        8 nodes of 4 RTX 2080 Ti, joined by another network than the preset's
    cluster.toml               a file in the form of `TOML_FORM`, e.g. one that `cluster_toml` wrote
"""

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError, MeshError
from autopar.values.choices import LONGEST, near, near_words
from autopar.values.cluster_tables import ClusterTable, DeviceTable, figure_line, figures, quote, sourced
from autopar.values.device import Device
from autopar.values.domains import MOST_DEVICES
from autopar.values.link import LinkLevel
from autopar.values.link_file import level_toml, preset_networks, read_level
from autopar.values.schema import check_texts, checked, file_text

CALIBRATED = {
    "attention": 1.0, "attention_per_head": 0.0, "attention_per_key": 0.0, "launch_in_step": 1.0, "bytes_in_step": 1.0,
    "flops_in_step": 1.0, "optimizer_bytes": 1.0, "replay_launches": 2.0
}  # fmt: skip
"""Figures of a device that only calibration finds, and what they are where it did not."""

TOML_FORM = """\
name = "my cluster"
device = "h100"            # a preset, or a [device] table as in cost_models/hardware/h100.toml
library = "nccl"           # whose algorithms run: nccl, gloo, mpi or any (optional)
[[levels]]                 # slowest level first
name = "infiniband"
size = 64                  # groups joined at this level: here nodes
alpha = 8e-6               # seconds a message, or { value = 8e-6, source = "where it comes from" }
bandwidth = 50e9           # bytes/s of one link in each direction
devices_per_link = 1       # devices that share the link (optional)
[[levels]]
link = "nvlink4"           # all figures of a file of cost_models/interconnects
size = 8
"""

_SHOULD = f"it should look like this:\n{TOML_FORM}"

MAX_TOML = 1 << 17
"""The longest cluster file that is read: ten times a calibrated one; TOML takes its reader long."""

PRESET = re.compile(
    r"(?:(?P<nodes>\d{1,18})x)?(?P<per_node>\d{1,18})x(?P<device>[a-z][a-z0-9-]*)(?:@(?P<network>[a-z0-9-]+))?"
)

NEARLY = re.compile(r"(?P<sizes>(?:\d+[x*])*\d*)[x*]?(?P<device>[a-z][a-z0-9-]*)(?:@(?P<network>[a-z0-9-]*))?")
"""What may have been meant as a preset: `8h100`, `8*h100`, `h100`, a name that is misspelled."""

LIBRARIES = ("nccl", "gloo", "mpi", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`levels` from the slowest (nodes) to the fastest (devices of one node); `library` runs the collectives."""

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]
    library: str = "nccl"

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            raise ClusterError(
                f"cluster {self.name}: library {self.library!r} is none of {', '.join(LIBRARIES)}"
                f"{near(self.library, LIBRARIES)}"
            )
        if not self.levels:
            raise ClusterError(f"cluster {self.name} has no link level; one device is one level of size 1")
        if self.num_devices > MOST_DEVICES:
            raise ClusterError(
                f"cluster {self.name[:60]} has {self.num_devices} devices; at most {MOST_DEVICES} can be planned for"
            )

    def __hash__(self) -> int:
        # A search looks clusters up by the hundred thousand; those of one search differ in sizes.
        return hash((*(level.size for level in self.levels), self.device.memory_bytes))

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


def resized(machine: Cluster, nodes: int, per_node: int) -> Cluster:
    """A cluster of the same devices and links with another number of them.

    Raises:
        MeshError: if the cluster has no link between nodes and several are needed.
    """
    if machine.num_devices == nodes * per_node:
        return machine
    sizes = (nodes, per_node) if nodes > 1 else (per_node,)
    if len(sizes) > len(machine.levels):
        raise MeshError(
            f"cluster {machine} is one node, but processes on {nodes} nodes were started; name a cluster of several, "
            f"such as {nodes}x{machine}"
        )
    levels = [dataclasses.replace(level, size=n) for level, n in zip(machine.levels[-len(sizes) :], sizes, strict=True)]
    return dataclasses.replace(machine, name=f"{'x'.join(map(str, sizes))} of {machine}", levels=tuple(levels))


def preset_devices() -> tuple[str, ...]:
    """Names of the devices that a preset may name."""
    folder = resources.files("autopar.cost_models") / "hardware"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


def load_cluster(text_or_path: str | Path) -> Cluster:
    """The cluster named by a preset text, or described by a TOML file.

    Raises:
        ClusterError: if the text is no preset and no file, or the file is not valid.
    """
    name = str(text_or_path)
    if isinstance(text_or_path, Path) or name.endswith(".toml") or _is_file(name):
        return _from_file(Path(text_or_path))
    return load_preset(name)


def load_preset(name: str) -> Cluster:
    """The cluster named by a preset text; no file is read.

    Raises:
        ClusterError: if the text is no preset.
    """
    match = PRESET.fullmatch(name.strip().lower())
    if match is None or match["device"] not in preset_devices() or match["network"] not in (None, *preset_networks()):
        meant = near_presets(name)
        raise ClusterError(
            f"cluster {name!r} is neither a preset nor a TOML file"
            + (f"; did you mean {', '.join(meant)}?" if meant else ".")
            + " A preset is NODESxDEVICESxNAME or DEVICESxNAME (64x8xh100, 8xh100) with NAME one of "
            + f"{', '.join(preset_devices())}; behind several nodes may stand @NETWORK (8x4xrtx2080ti@10gbe), one of "
            + ", ".join(preset_networks())
            + ("" if meant else f"; a TOML file looks like this:\n{TOML_FORM}")
        )
    return _from_preset(name.strip().lower(), match)


def near_presets(name: str) -> list[str]:
    """Presets that a text which is none may mean, the closest first; of a device's bare name 8 of them."""
    match = NEARLY.fullmatch(name.replace(" ", "").lower()) if len(name) <= LONGEST else None
    if match is None or not (match["sizes"] or match["device"] in preset_devices()):
        return []
    sizes = match["sizes"].replace("*", "x").strip("x") or "8"
    devices = near_words(match["device"], preset_devices())
    networks = [""] if match["network"] is None else [f"@{n}" for n in near_words(match["network"], preset_networks())]
    found = [f"{sizes}x{device}{network}" for device in devices for network in networks]
    return [preset for preset in found if PRESET.fullmatch(preset)][:3]


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long for a path
        return False


def _from_preset(name: str, match: re.Match[str]) -> Cluster:
    hardware = _hardware(match["device"])
    where = f"preset {match['device']}"
    tables = [dict(table) for table in hardware["levels"]]
    # The hardware file's levels are those of a whole cluster; one node needs only the last of them.
    sizes = [int(n) for n in (match["nodes"], match["per_node"]) if n is not None]
    if match["network"] is not None:
        if len(sizes) == 1:
            raise ClusterError(
                f"cluster {name!r}: {match['network']} joins nodes, and there is but one; write the number of nodes in "
                f"front, as in 2x{name}"
            )
        tables = [{"link": match["network"]}, tables[-1]]
    if len(sizes) > len(tables):
        raise ClusterError(
            f"cluster {name!r}: no link between nodes of {match['device']} is known; write {sizes[0] * sizes[1]}x"
            f"{match['device']} for one node, name a network ({name}@10gbe), or describe it in a TOML file:\n"
            f"{TOML_FORM}"
        )
    levels = []
    for depth, (size, table) in enumerate(zip(sizes, tables[len(tables) - len(sizes) :], strict=True)):
        limit = table.pop("max_size", size)
        if not 1 <= size <= limit:
            raise ClusterError(
                f"cluster {name!r}: {table.get('link') or table['name']} joins 1 to {limit} {match['device']}, "
                f"not {size}; write the number of nodes in front, as in 2x{limit}x{match['device']}"
            )
        levels.append(read_level(table | {"size": size}, math.prod(sizes[depth + 1 :]), where, TOML_FORM))
    device = _device(_device_table(hardware, where))
    return Cluster(name=name, device=device, levels=tuple(levels), library=hardware.get("library", "nccl"))


def _from_file(path: Path) -> Cluster:
    where = f"cluster file {path}"
    try:
        document = tomllib.loads(file_text(path, ClusterError, "presets are 8xh100, 64x8xh100, ...", MAX_TOML))
        check_texts(document)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(f"{where} is not TOML: {error}. It should look like this:\n{TOML_FORM}") from error
    table = checked(ClusterTable, document, where, ClusterError, _SHOULD, partial=True)
    device, library = table.device, table.library
    if isinstance(device, str):
        if device not in preset_devices():
            raise ClusterError(
                f"{where}: device {device!r} is not one of {', '.join(preset_devices())}; give a [device] table"
                f"{near(device, preset_devices())}"
            )
        hardware = _hardware(device)
        device, library = _device_table(hardware, where), library or hardware.get("library")
    levels = _levels(document["levels"], where)
    try:
        return Cluster(name=table.name, device=_device(device), levels=levels, library=library or "nccl")
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _levels(tables: list[dict[str, Any]], where: str) -> tuple[LinkLevel, ...]:
    """From the fastest level up, because a machine's one link is shared by all devices below it."""
    levels: list[LinkLevel] = []
    for number, table in reversed([*enumerate(tables)]):
        below = math.prod(level.size for level in levels)
        levels.insert(0, read_level(table, below, f"{where}: levels[{number}]", TOML_FORM))
    return tuple(levels)


def _hardware(name: str) -> dict[str, Any]:
    return tomllib.loads(
        (resources.files("autopar.cost_models") / "hardware" / f"{name}.toml").read_text(encoding="utf-8")
    )


def _device_table(hardware: Mapping[str, Any], where: str) -> DeviceTable:
    return checked(DeviceTable, hardware["device"], where, ClusterError, _SHOULD, partial=True)


def _device(table: DeviceTable) -> Device:
    values, sources = figures(table, ("memory_bytes", "memory_bandwidth", "launch_seconds", "efficiency", *CALIBRATED))
    if not table.peak_flops:
        raise ClusterError(f"device {table.name}: peak_flops must say flop/s of one dtype at least")
    peaks, peak_sources = sourced(table.peak_flops, None)
    return Device(
        name=table.name,
        peak_flops=tuple(peaks.items()),
        memory_bytes=int(values["memory_bytes"]),
        memory_bandwidth=values["memory_bandwidth"],
        launch_seconds=values["launch_seconds"],
        efficiency=values["efficiency"],
        **{field: values.get(field, default) for field, default in CALIBRATED.items()},
        sources=sources + tuple((f"peak_flops.{dtype}", source) for dtype, source in peak_sources),
    )


def cluster_toml(cluster: Cluster) -> str:
    """The cluster as a file that `load_cluster` reads back as an equal value."""
    device, sources = cluster.device, dict(cluster.device.sources)
    lines = [f"name = {quote(cluster.name)}", f"library = {quote(cluster.library)}", ""]
    lines += ["[device]", f"name = {quote(device.name)}"]
    for field in ("memory_bytes", "memory_bandwidth", "launch_seconds", "efficiency"):
        lines.append(figure_line(field, getattr(device, field), sources.get(field)))
    for field, default in CALIBRATED.items():
        if getattr(device, field) != default or field in sources:
            lines.append(figure_line(field, getattr(device, field), sources.get(field)))
    lines += ["", "[device.peak_flops]"]
    lines += [figure_line(quote(dtype), peak, sources.get(f"peak_flops.{dtype}")) for dtype, peak in device.peak_flops]
    for level in cluster.levels:
        lines += ["", *level_toml(level)]
    return "\n".join(lines) + "\n"
