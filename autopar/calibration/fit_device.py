"""Which rates explain the measured operations? Peak, its reachable part, memory bandwidth, launch: the roofline's own.

    seconds = sum over the passes of max(flops / (peak efficiency), nbytes / bandwidth) + launch

forward and backward, flops and bytes as planning counts them; attention's flops as many times as `Device` says, found
of its own measurements once all else is. Constants minimise a robust sum of log errors (SciPy,
soft L1), so that being twice too fast is as bad as being twice too slow. The peak of the first dtype is that of its
fastest product; the efficiency, which all dtypes share, is the part of it that products reach on the whole, and other
dtypes' peaks are set so that peak times efficiency is what theirs reach.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.calibration.predict import predicted_work
from autopar.calibration.samples import Origin, WorkSample
from autopar.errors import ClusterError
from autopar.values.cluster import load_cluster
from autopar.values.device import Device

SOFT = 0.1
"""Log errors beyond this count linearly, below it squared."""


def fit_device(samples: Sequence[WorkSample], origin: Origin) -> tuple[Device, tuple[float, ...]]:
    """The device, and the relative error of each sample.

    Raises:
        ClusterError: if there are no matrix products or no memory-bound operations among the samples.
    """
    attention = [sample for sample in samples if sample.attention]
    samples = [sample for sample in samples if not sample.attention]
    dtypes = list(dict.fromkeys(sample.dtype for sample in samples if sample.flops))
    if not dtypes or all(sample.flops for sample in samples):
        raise ClusterError("a device is fitted to matrix products and memory-bound operations; measure some of both")
    seconds = np.array([sample.seconds for sample in samples])
    flops = np.array([[sample.flops, 2 * sample.flops] for sample in samples])
    nbytes = np.array([[sample.nbytes, sample.backward_nbytes] for sample in samples])
    product = np.array([dtypes.index(sample.dtype) if sample.flops else -1 for sample in samples])

    def predicted(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        launch, bandwidth, *rates = np.exp(logs)
        rate = np.where(product >= 0, np.array([*rates, 1.0])[product], 1.0)
        passes = np.maximum(flops / rate[:, None], nbytes / bandwidth) + launch
        result: npt.NDArray[np.float64] = passes.sum(axis=1)
        return result

    fastest = [float((flops.sum(axis=1) / seconds)[product == k].max()) for k in range(len(dtypes))]
    bandwidth = float((nbytes.sum(axis=1) / seconds)[product < 0].max())
    start = np.log([float(seconds.min()) / 2, bandwidth / 2, *(rate / 2 for rate in fastest)])
    answer = least_squares(lambda logs: np.log(predicted(logs) / seconds), start, loss="soft_l1", f_scale=SOFT)
    launch, bandwidth, *rates = np.exp(answer.x).tolist()
    errors = tuple(np.abs(predicted(answer.x) / seconds - 1).tolist())
    efficiency = min(1.0, rates[0] / fastest[0])
    memory_bound = [error for error, k in zip(errors, product, strict=True) if k < 0]
    whose = "of the host, shared by its ranks" if origin.device == "cpu" else "of the device"
    whose_launch = "autograd included" if origin.device == "cpu" else "the device's alone"
    peaks = []
    sources = [
        ("memory_bytes", f"{origin}: {whose}"),
        ("memory_bandwidth", f"{origin}: {_error_text(memory_bound)} of memory-bound operations"),
        ("launch_seconds", f"{origin}: fitted together with the rates, {whose_launch}"),
        ("efficiency", f"{origin}: fitted {dtypes[0]} products over the fastest of them"),
    ]
    for k, (dtype, rate) in enumerate(zip(dtypes, rates, strict=True)):
        peaks.append((dtype, rate / efficiency))
        own = [error for error, which in zip(errors, product, strict=True) if which == k]
        sources.append((f"peak_flops.{dtype}", f"{origin}: {_error_text(own)} of products"))
    device = Device(
        name=origin.device,
        peak_flops=tuple(peaks),
        memory_bytes=origin.memory_bytes,
        memory_bandwidth=bandwidth,
        launch_seconds=launch,
        efficiency=efficiency,
        sources=tuple(sources),
    )
    return with_attention(device, attention, origin), errors


def with_attention(device: Device, samples: Sequence[WorkSample], origin: Origin) -> Device:
    """The device with what attention takes beside products of as many flops, by the size of its heads
    and by the keys that queries see."""
    if not samples:
        return device

    def of(logs: npt.NDArray[np.float64]) -> Device:
        always, per_head, per_key = np.exp(logs).tolist()
        return replace(device, attention=always, attention_per_head=per_head, attention_per_key=per_key)

    alone = load_cluster("1xcpu")

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        cluster = replace(alone, device=of(logs))
        return [math.log(predicted_work(cluster, sample) / sample.seconds) for sample in samples]

    start = [math.log(0.5), math.log(64.0), math.log(256.0)]
    answer = least_squares(errors, start, loss="soft_l1", f_scale=SOFT).x
    said = _error_text(np.abs(np.expm1(errors(answer))).tolist())
    source = f"{origin}: {said} of attention with heads of {_heads(samples)}"
    fields = ("attention", "attention_per_head", "attention_per_key")
    return replace(of(answer), sources=(*device.sources, *((field, source) for field in fields)))


def _heads(samples: Sequence[WorkSample]) -> str:
    return " and ".join(str(head) for head in sorted({sample.attention[-1] for sample in samples}))


def _error_text(errors: Sequence[float]) -> str:
    return f"median error {np.median(errors):.1%}, largest {np.max(errors):.1%} over {len(errors)} measurements"
