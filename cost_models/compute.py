"""How long does an operation take on one device? The formulas that planner and simulator share.

    matrix product    max(slots / peak, nbytes / bandwidth) / gemm, batched / scores       (slots: `cost_models.gemm`,
                      where rows of an odd length take several times as long too)
    attention         max(flops / peak, nbytes / bandwidth) / attention, backward's flops at `FLASH_BACKWARD` of it
    anything else     max(flops / peak, nbytes / (bandwidth * memory))

plus a launch; gemm, scores, attention and memory are the parts of nominal rates that training reaches, fitted for some
devices (`cost_models.efficiency`). A device without such constants, and a calibrated one, whose figures are reached
already, have the roofline of their own (Williams, Waterman, Patterson 2009, "Roofline: an insightful visual ..."):

    max(flops_in_step * flops / (peak * efficiency), bytes_in_step * nbytes / bandwidth) + launch_in_step * launch

where *_in_step are what flops, bytes (on a host the first `CACHED`) and launches take within a training step, over what
operations timed alone say (1 unless calibrated); an optimizer's bytes count `optimizer_bytes` times beside. Flops of
attention in 16 bits, and on a host in any dtype, count `attention + attention_per_head / d + attention_per_key / s`
times there, for heads of d elements and s keys a query sees: its kernels' softmax takes as long for short heads as for
long ones, and blocks of keys are begun, masked and ended. flops of one device, a multiply-add counting two; nbytes that
the operation reads and writes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.efficiency import Efficiency, fitted_efficiency
from autopar.cost_models.gemm import is_16_bit, misaligned, slot_flops
from autopar.values.device import Device

HOST = "cpu"
"""The device that Python runs on too, where torch loops over parameters by default and has kernels of its own."""

FUSED_LAUNCHES = 0.5
"""What a host takes for a parameter of which a fused optimizer updates the whole, beside its bytes: Python finds its
state, and the kernel begins. 13 to 17 us where an operation's launch took 36, in steps of GPT-2 and ViT of two blocks,
hidden 128, on one rank (torch 2.13.0, 2026-11-28)."""

SPLIT_LAUNCHES = 3
"""What a host's optimizer takes for a parameter of which it has a part, beside the update: torch dispatches a DTensor.
2.7 to 4.0 launches, as calibrated alone, for each kernel of a step of fused AdamW: GPT-2, Llama, BERT and ViT of two
blocks, hidden 128, ZeRO-3 beside data parallel, by the CPU seconds of 4 ranks (torch 2.13.0, 2 cores, 2026-11-27)."""

HOST_KEYS = 512
"""How many keys make a block of torch's flash attention on a host, which is worked at whole where a query sees some of
them, causal or not (ATen, native/cpu/FlashAttentionKernel.cpp, `kvSplitSize`; up to 512 keys a causal one takes as long
as one that sees all, 0.95 to 1.1 times, torch 2.13.0)."""

CACHED = 2 << 20
"""Bytes of an operation up to which a host's factor for bytes in a step holds: about what the largest operation of the
steps moves that it is found of (`calibration.reference_steps`; GELU's 1.6 MB forward, 2.5 MB back)."""

COPIED = 2
"""How often a bucket's bytes are moved beside the message: read and written, into it or out of it (`ops.buckets`)."""

FLASH_BACKWARD = 0.8  # rate of a flash kernel's backward, of its forward: Dao 2023, arXiv:2307.08691, figures 5 and 6


def compute_seconds(flops: float, nbytes: float, dtype: str, device: Device) -> float:
    """Seconds of one operation by the roofline; `dtype` is that of its matrix products, looked up if it has flops.

    Raises:
        ArgumentError: if the operation has flops in a dtype for which the device has no peak.
    """
    work = device.flops_in_step * flops / (device.peak(dtype) * device.efficiency) if flops else 0.0
    return max(work, moved_seconds(nbytes, device)) + device.launch_in_step * device.launch_seconds


def moved_seconds(nbytes: float, device: Device) -> float:
    """Seconds for the bytes of one operation; on a host those beyond `CACHED` take what they take alone."""
    beyond = max(nbytes - CACHED, 0.0) if device.name == HOST else 0.0
    return (device.bytes_in_step * (nbytes - beyond) + beyond) / device.memory_bandwidth


def product_seconds(
    m: float, n: float, k: float, nbytes: float, peak: float, device: Device, num_sms: int, batch: float = 1
) -> float:
    """Seconds at nominal rates of `batch` products (m, k) x (k, n): of its slots, or of its bytes if longer."""
    return max(slot_flops(m, n, k, num_sms, batch) / peak, nbytes / device.memory_bandwidth)


def attention_seconds(flops: float, nbytes: float, peak: float, device: Device, *, backward: bool) -> float:
    """Seconds at nominal rates of a flash kernel."""
    return max(flops / peak / (FLASH_BACKWARD if backward else 1.0), nbytes / device.memory_bandwidth)


@dataclass(frozen=True, slots=True)
class Rates:
    """What operations cost on a device: by fitted constants where it has them, else (`fitted` None) by roofline.

    padded: as if rows in memory were whole pieces of 16 bytes all.
    """

    device: Device
    fitted: Efficiency | None
    padded: bool = False

    @property
    def name(self) -> str:
        """Which formulas these are, in words for a plan's file."""
        if self.fitted is None:
            return f"roofline of {self.device.name}"
        return self.fitted.title

    def products(
        self, sizes: Sequence[tuple[int, int, int, int]], nbytes: float, dtype: str, *, rows: tuple[int, ...] = ()
    ) -> float:
        """Of the matrix products (batch, m, n, k) of one pass of an op, each of which moves `nbytes`.

        rows: lengths of the rows of its operands and results in memory, where they matter.
        """
        longer = 1.0 if self.padded or self.device.name == HOST else misaligned(rows, dtype)
        if self.fitted is None:
            flops = sum(2.0 * math.prod(size) for size in sizes)
            return compute_seconds(longer * flops, nbytes * len(sizes), dtype, self.device)
        fitted, peak, seconds = self.fitted, self.device.peak(dtype) / longer, 0.0
        for batch, m, n, k in sizes:
            nominal = product_seconds(m, n, k, nbytes, peak, self.device, fitted.num_sms, batch)
            seconds += nominal / (fitted.gemm if batch == 1 else fitted.scores) + fitted.kernel_seconds
        return seconds

    def attention(
        self, flops: float, nbytes: float, dtype: str, *, head: int, keys: float, every: float, backward: bool = False
    ) -> float:
        """Of a flash kernel with heads of so many elements, whose queries see so many keys each, of `every` that there
        are."""
        if self.fitted is None:
            own, longer = self.device, 1.0
            if own.name == HOST:
                worked = max(min(every, keys + HOST_KEYS / 2), keys)
                flops, keys = flops * worked / max(keys, 1), worked
            if own.name == HOST or is_16_bit(dtype):
                longer = own.attention + own.attention_per_head / max(head, 1) + own.attention_per_key / max(keys, 1)
            return compute_seconds(longer * flops, nbytes, dtype, self.device)
        nominal = attention_seconds(flops, nbytes, self.device.peak(dtype), self.device, backward=backward)
        return nominal / self.fitted.attention + self.fitted.kernel_seconds

    def other(self, flops: float, nbytes: float, dtype: str) -> float:
        if self.fitted is None:
            return compute_seconds(flops, nbytes, dtype, self.device)
        work = flops / self.device.peak(dtype) if flops else 0.0
        return max(work, nbytes / self.device.memory_bandwidth / self.fitted.memory) + self.fitted.kernel_seconds

    def least(
        self, flops: float, nbytes: float, dtype: str, *, products: bool = False, attention: bool = False
    ) -> float:
        """What no operation of so many flops and bytes stays below, however they are shaped."""
        if self.fitted is None and attention:
            return self.other(min(1.0, self.device.attention) * flops, nbytes, dtype)
        if self.fitted is None or not (products or attention):
            return self.other(flops, nbytes, dtype)
        part = self.fitted.attention if attention else max(self.fitted.gemm, self.fitted.scores)
        return max(flops / self.device.peak(dtype), nbytes / self.device.memory_bandwidth) / part

    @property
    def replay_seconds(self) -> float:
        """What a host that computes itself takes to have an operation run again, beside running it: Python keeps how it
        is called, and calls it. In front of another device's queue it has time for that."""
        return self.device.replay_launches * self.other(0.0, 0.0, "") if self.device.name == HOST else 0.0

    def update(self, nbytes: float, num_kernels: int) -> float:
        """Of an optimizer that updates a parameter in so many kernels, which move so many bytes; one if it is fused."""
        if self.device.name != HOST:
            return self.other(0.0, nbytes, "")
        launches = num_kernels if num_kernels > 1 else FUSED_LAUNCHES
        return self.device.optimizer_bytes * moved_seconds(nbytes, self.device) + launches * self.other(0.0, 0.0, "")

    @property
    def split_seconds(self) -> float:
        """What a host that computes itself takes to have a kernel of its optimizer update a part of a parameter, beside
        running it. In front of another device's queue it has time for that."""
        return SPLIT_LAUNCHES * self.device.launch_seconds if self.device.name == HOST else 0.0

    def copied_seconds(self, nbytes: float) -> float:
        """What it takes a host to copy parameters or gradients into a message, or out of it. Of other devices that is
        part of the rate that their training reaches on links."""
        if self.device.name != HOST:
            return 0.0
        return COPIED * moved_seconds(nbytes, self.device)

    def link(self, parameters: bool) -> float:
        """The part of the collective model's bandwidth that parameters and gradients reach, or else activations."""
        if self.fitted is None:
            return 1.0
        return self.fitted.data_link if parameters else self.fitted.tensor_link


def rates_of(device: Device) -> Rates:
    """The formulas for a device."""
    return Rates(device, fitted_efficiency(device))
