"""Clusters: presets, files and what is wrong with them."""

import dataclasses
from pathlib import Path

import pytest

from autopar.cost_models.algorithms import LIBRARIES as ALGORITHMS_OF
from autopar.errors import ArgumentError, ClusterError
from autopar.values.cluster import (
    CALIBRATED,
    LIBRARIES,
    TOML_FORM,
    Cluster,
    cluster_toml,
    load_cluster,
    preset_devices,
    with_memory,
)
from autopar.values.device import Device
from autopar.values.link import Line, LinkLevel
from autopar.values.link_file import preset_links, preset_networks, read_level

NODE_NAMES = sorted(set(preset_devices()) - {"cpu"})


@pytest.mark.parametrize("name", NODE_NAMES)
def test_a_preset_of_nodes_has_the_slow_level_first(name: str) -> None:
    cluster = load_cluster(f"64x8x{name}")
    assert [level.size for level in cluster.levels] == [64, 8]
    assert cluster.num_devices == 512
    across, inside = cluster.levels
    assert across.bandwidth_per_device < inside.bandwidth_per_device
    assert across.alpha > inside.alpha


@pytest.mark.parametrize("name", preset_devices())
def test_one_node_is_the_fast_level_of_the_same_device(name: str) -> None:
    cluster = load_cluster(f"4x{name}")
    assert [level.size for level in cluster.levels] == [4]
    if name != "cpu":
        several = load_cluster(f"2x4x{name}")
        assert cluster.levels[0] == several.levels[1]
        assert cluster.device == several.device


@pytest.mark.parametrize("name", preset_devices())
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    cluster = load_cluster(f"2x4x{name}" if name != "cpu" else "4xcpu")
    fields = {"memory_bytes", "memory_bandwidth", "launch_seconds", "efficiency"}
    fields |= {f"peak_flops.{dtype}" for dtype, _ in cluster.device.peak_flops}
    fields |= {field for field, default in CALIBRATED.items() if getattr(cluster.device, field) != default}
    assert {field for field, source in cluster.device.sources if source} == fields
    for level in cluster.levels:
        assert {"alpha", "bandwidth"} <= {field for field, source in level.sources if source}


@pytest.mark.parametrize("name", preset_links())
def test_an_interconnect_says_where_every_figure_comes_from_and_none_is_faster_than_its_line_rate(name: str) -> None:
    level = read_level({"link": name, "size": 2}, 8, name, "")
    assert level.name == name
    assert level.line_rate is not None
    lines = [*level.lines, *([] if level.in_network is None else [level.in_network])]
    places = [f"lines.{k}" for k in range(len(level.lines))] + ["in_network"] * (level.in_network is not None)
    assert set(dict(level.sources)) == {"line_rate", "alpha", "bandwidth", "launch"} | {
        f"{place}.{field}" for place in places for field in ("alpha", "bandwidth", "launch")
    }
    for line in [level, *lines]:
        assert 0 < line.bandwidth <= level.line_rate
        assert 0 < line.alpha < 1e-2
    assert level.scope == ("node" if name.startswith(("nvlink", "pcie")) else "network")


def test_generations_of_a_link_are_ordered() -> None:
    def rates(*names: str) -> list[float]:
        return [read_level({"link": name, "size": 2}, 8, name, "").bandwidth for name in names]

    for names in [
        ("nvlink2", "nvlink3", "nvlink4", "nvlink5"),
        ("pcie3-host", "pcie3", "pcie4", "pcie5", "nvlink2"),
        ("10gbe", "100gbe", "infiniband-edr", "infiniband-hdr", "infiniband-ndr"),
        ("roce-100", "roce-200", "roce-400"),
    ]:
        assert rates(*names) == sorted(rates(*names)), names


def test_a_network_is_named_behind_the_nodes() -> None:
    cluster = load_cluster("8x4xa100@10gbe")
    assert [level.name for level in cluster.levels] == ["10gbe", "nvlink3"]
    assert cluster.levels[0].devices_per_link == 4, "a machine has one such link"
    assert cluster.levels[1] == load_cluster("4xa100").levels[0]
    assert load_cluster("2x4xcpu@10gbe").library == "gloo"
    assert load_cluster("8x8xh100@infiniband-ndr").levels == load_cluster("8x8xh100").levels


@pytest.mark.parametrize("network", preset_networks())
def test_every_device_may_stand_on_every_network(network: str) -> None:
    for device in preset_devices():
        cluster = load_cluster(f"16x4x{device}@{network}")
        across, inside = cluster.levels
        assert (across.name, across.size, inside.size) == (network, 16, 4)
        assert inside == load_cluster(f"4x{device}").levels[0]


def test_the_library_of_a_cluster_is_one_whose_algorithms_are_known() -> None:
    assert set(LIBRARIES) == set(ALGORITHMS_OF)
    with pytest.raises(ClusterError, match="library 'ncl' is none of nccl, gloo"):
        dataclasses.replace(load_cluster("8xh100"), library="ncl")


def test_no_line_is_faster_than_the_link() -> None:
    level = load_cluster("8xh100").levels[0]
    with pytest.raises(ClusterError, match=r"bandwidth 5e\+11 bytes/s is above its line rate 4.5e\+11"):
        dataclasses.replace(level, lines=(Line(alpha=1e-6, bandwidth=5e11),))


def test_the_most_specific_lines_of_a_level_hold() -> None:
    level = LinkLevel(
        name="l",
        size=2,
        alpha=1.0,
        bandwidth=1.0,
        lines=(
            Line(alpha=2.0, bandwidth=1.0, protocol="small"),
            Line(alpha=3.0, bandwidth=1.0, algorithm="tree"),
            Line(alpha=4.0, bandwidth=1.0, kind="all_gather"),
            Line(alpha=5.0, bandwidth=1.0, kind="all_gather", algorithm="tree"),
        ),
    )

    def alphas(algorithm: str, kind: str) -> dict[str, float]:
        return {protocol: line.alpha for protocol, line in level.lines_of(algorithm, kind).items()}

    assert alphas("ring", "all_reduce") == {"": 1.0, "small": 2.0}
    assert alphas("tree", "all_reduce") == {"": 3.0}
    assert alphas("ring", "all_gather") == {"": 4.0}
    assert alphas("tree", "all_gather") == {"": 5.0}


def test_preset_text_is_not_case_sensitive() -> None:
    assert load_cluster("8xH100") == load_cluster("8xh100")


def test_torch_dtype_names_are_understood() -> None:
    device = load_cluster("8xh100").device
    assert device.peak("bfloat16") == device.peak("bf16") == 989e12
    assert device.peak("float32") == device.peak("fp32") < device.peak("tf32")


def test_a_dtype_without_figure_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"v100 has no peak flop/s for bf16: it knows fp16, fp32, fp64"):
        load_cluster("8xv100").device.peak("bf16")


def test_a_shared_link_gives_each_device_its_part() -> None:
    level = load_cluster("2x8xv100").levels[0]
    assert level.devices_per_link == 2
    assert level.bandwidth_per_device == level.bandwidth / 2


def test_memory_can_be_overridden() -> None:
    cluster = load_cluster("8xh100")
    small = with_memory(cluster, 10**9)
    assert small.device.memory_bytes == 10**9
    assert dict(small.device.sources)["memory_bytes"] == "given by the caller"
    same = dataclasses.replace(small.device, memory_bytes=cluster.device.memory_bytes, sources=cluster.device.sources)
    assert dataclasses.replace(small, device=same) == cluster
    with pytest.raises(ClusterError, match="memory_bytes -1 must be positive"):
        with_memory(cluster, -1)


@pytest.mark.parametrize(
    "cluster",
    [
        *(load_cluster(f"2x4x{name}") for name in NODE_NAMES),
        load_cluster("4xcpu"),
        with_memory(load_cluster("8x8xh100"), 12_345),
        Cluster(
            name='odd "name" \\ ü',
            device=Device(
                name="d",
                peak_flops=(("fp32", 1e12 / 3),),
                memory_bytes=7,
                memory_bandwidth=1 / 3,
                launch_seconds=0.0,
                efficiency=1.0,
                attention=0.7,
                attention_per_key=1e3 / 7,
                bytes_in_step=1.0 / 3,
                flops_in_step=1.0 / 9,
                optimizer_bytes=1.0 / 7,
                replay_launches=0.0,
                sources=(("attention_per_head", "none, as measured"), ("launch_in_step", "one, as measured")),
            ),
            levels=tuple(LinkLevel(name=f"l{k}", size=k, alpha=1e-7 / k, bandwidth=1e9 / k) for k in (2, 3, 5)),
            library="mpi",
        ),
        dataclasses.replace(
            load_cluster("8x4xa100@100gbe"),
            levels=(
                LinkLevel(
                    name="measured",
                    size=3,
                    alpha=1e-5,
                    bandwidth=1e9,
                    launch=2e-6,
                    line_rate=2e9,
                    devices_per_link=2,
                    lines=(
                        Line(alpha=2e-5, bandwidth=5e8, kind="all_gather", protocol="small"),
                        Line(alpha=1e-4, bandwidth=1e9, launch=1e-3, algorithm="tree"),
                    ),
                    in_network=Line(alpha=1e-6, bandwidth=2e9),
                    sources=(("alpha", "here"), ("bandwidth", "here"), ("lines.1.alpha", "there")),
                ),
            ),
        ),
    ],
    ids=lambda cluster: cluster.device.name,
)
def test_a_written_cluster_reads_back_equal(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster
    assert hash(load_cluster(str(path))) == hash(cluster)


def test_the_form_shown_in_messages_is_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML_FORM)
    cluster = load_cluster(path)
    assert cluster.num_devices == 512
    assert cluster.device == load_cluster("8xh100").device


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8h100", "8xh100"),
        ("64 x 8*H100", "64x8xh100"),
        ("h100", "8xh100"),
        ("8xh101", "8xh100"),
        ("8xh100x8", "8xh100"),
        ("2x8xh100@11gbe", "2x8xh100@10gbe"),
        ("2x8xh100@infiniband", "2x8xh100@infiniband-ndr"),
        *((text, None) for text in ("0x", "", "gpu", "my-machine", "2x2x2xh100", "2x8xh100@nvlink4", "x" * 5000)),
    ],
)
def test_an_unknown_text_is_answered_with_the_presets_and_what_is_near_or_the_form(
    text: str, meant: str | None
) -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster(text)
    message = str(caught.value)
    assert repr(text) in message
    assert all(name in message for name in preset_devices() + preset_networks())
    assert (f"; did you mean {meant}" in message) == (meant is not None)
    assert (TOML_FORM in message) == (meant is None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16xh100", "nvlink4 joins 1 to 8 h100, not 16; .* as in 2x8xh100"),
        ("0x8xh100", "infiniband-ndr joins 1 to .* not 0"),
        ("2x4xcpu", "no link between nodes of cpu is known; write 8xcpu .* name a network \\(2x4xcpu@10gbe\\)"),
        ("8xh100@10gbe", "10gbe joins nodes, and there is but one; .* as in 2x8xh100@10gbe"),
        ("missing.toml", "missing.toml cannot be read .*No such file"),
    ],
)
def test_a_preset_that_cannot_be_says_what_can(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        load_cluster(text)


LEVEL = '[[levels]]\nname = "l"\nsize = 2\nalpha = 1e-6\nbandwidth = 1e9\n'


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("name = [", "is not TOML"),
        ('name = "c"\ndevice = "h100"\n', "levels: missing"),
        ('name = "c"\ndevice = "h101"\n' + LEVEL, "device 'h101' is not one of a100"),
        ('name = "c"\ndevice = 3\n' + LEVEL, "device: expected .* or an object, found 3"),
        ('name = 3\ndevice = "h100"\n' + LEVEL, "name: expected a valid string, found 3"),
        ('name = "c"\ndevice = "h100"\nlevels = 3\n', "levels: expected a valid array, found 3"),
        ('name = "c"\ndevice = "h100"\nlevels = []\n', "cluster c has no link level"),
        ('name = "c"\ndevice = "h100"\n' + LEVEL + "speed = 3\n", r"levels\[0\].speed: unknown key"),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL.replace("= 2", "= 2.5"),
            r"levels\[0\].size: expected a valid integer, found 2.5",
        ),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL.replace("= 2", "= 0"),
            r"levels\[0\].size: expected greater than or equal to 1, found 0",
        ),
        ('name = "c"\ndevice = "h100"\n' + LEVEL.replace("1e-6", "-1e-6"), "alpha -1e-06 must be finite and not neg"),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL.replace("1e9", "nan"),
            "bandwidth: expected a finite number .*found nan",
        ),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL.replace("1e9", '"fast"'),
            "bandwidth: expected a valid number .*found 'fast'",
        ),
        ('name = "c"\ndevice = "h100"\n' + LEVEL.replace("1e9", "{ value = 1e9 }"), "bandwidth.source: missing"),
        ('name = "c"\ndevice = "h100"\n' + LEVEL.replace("bandwidth = 1e9\n", ""), r"levels\[0\].bandwidth: missing"),
        ('name = "c"\ndevice = "h100"\n' + LEVEL.replace("1e9", "-1e9"), "bandwidth -1000000000.0 must be positive"),
        ('name = "c"\ndevice = "h100"\nlibrary = "ncl"\n' + LEVEL, "library 'ncl' is none of nccl, gloo, mpi, any"),
        ('name = "c"\ndevice = "h100"\nlibrary = 3\n' + LEVEL, "library: expected a valid string, found 3"),
        (
            'name = "c"\ndevice = "h100"\n[[levels]]\nlink = "nvlink9"\nsize = 2\n',
            "link 'nvlink9' is unknown; .* nvlink4",
        ),
        ('name = "c"\ndevice = "h100"\n' + LEVEL + 'scope = "rack"\n', "scope 'rack' is none of node, network"),
        ('name = "c"\ndevice = "h100"\n' + LEVEL + "line_rate = 1e8\n", "is above its line rate 1e\\+08"),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL + "lines = 3\n",
            r"levels\[0\].lines: expected a valid array, found 3",
        ),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL + "[[levels.lines]]\nalpha = 1e-6\n",
            r"lines\[0\].bandwidth: missing",
        ),
        (
            'name = "c"\ndevice = "h100"\n'
            + LEVEL
            + '[[levels.lines]]\nkind = "all_gather"\nalpha = -1\nbandwidth = 1\n',
            r"levels\[0\]: line all_gather: alpha -1.0 must be finite and not negative",
        ),
        (
            'name = "c"\ndevice = "h100"\n' + LEVEL + "[levels.in_network]\nalpha = 1e-6\n",
            "in_network.bandwidth: missing",
        ),
    ],
)
def test_a_faulty_file_is_answered_with_the_fault(document: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text(document)
    with pytest.raises(ClusterError, match=message) as caught:
        load_cluster(path)
    assert "faulty.toml" in str(caught.value)


def test_efficiency_is_a_part_of_the_peak() -> None:
    device = load_cluster("8xh100").device
    for efficiency in (0.0, 1.1):
        with pytest.raises(ClusterError, match="efficiency"):
            dataclasses.replace(device, efficiency=efficiency)
