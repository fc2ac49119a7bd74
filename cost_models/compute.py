"""How long does an operation take on one device? The roofline model.

    seconds = max(flops / (peak(dtype) * efficiency), nbytes / memory_bandwidth) + launch

flops of one device, a multiply-add counting two; nbytes that the operation reads and writes. Williams, Waterman,
Patterson 2009, "Roofline: an insightful visual performance model"; `launch` is the least time of any kernel.
"""

import numpy as np
import numpy.typing as npt

from autopar.device import Device


def compute_seconds(flops: float, nbytes: float, dtype: str, device: Device) -> float:
    """Seconds of one operation; `dtype` is that of its matrix products and matters only if it has flops.

    Raises:
        ArgumentError: if the operation has flops in a dtype for which the device has no peak.
    """
    work = flops / (device.peak(dtype) * device.efficiency) if flops else 0.0
    return max(work, nbytes / device.memory_bandwidth) + device.launch_seconds


def compute_seconds_array(
    flops: npt.NDArray[np.float64], nbytes: npt.NDArray[np.float64], dtype: str, device: Device
) -> npt.NDArray[np.float64]:
    """`compute_seconds` of every entry; `flops` and `nbytes` are broadcast together.

    Raises:
        ArgumentError: if any entry has flops in a dtype for which the device has no peak.
    """
    flops, nbytes = np.asarray(flops, dtype=np.float64), np.asarray(nbytes, dtype=np.float64)
    work = flops / (device.peak(dtype) * device.efficiency) if flops.any() else flops
    return np.maximum(work, nbytes / device.memory_bandwidth) + device.launch_seconds
