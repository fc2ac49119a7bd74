"""Which constants of a GPU type make the step-time formulas agree with measurements? Least squares on log error.

Every source weighs as much as any other of ten rows or more, bounds are the physical ranges, and a weak pull keeps a
constant that no row shows at where it starts: `STARTS`, figures that no row of the references was used for. Work is
computed once a case; a fit only prices it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.cost_models.efficiency import RANGES, Efficiency
from autopar.cost_models.step_time import step_parts
from autopar.cost_models.step_work import StepWork, step_work
from benchmarks.reference_rows import Case

PULL = 0.03  # of a full range, as much as an error of three per cent in every row of a source
# Constants that are not fitted: somebody measured them alone.
MEASURED = {
    "a100": {"attention": "Dao 2023, arXiv:2307.08691, figure 5: causal, head dim 128, 1k to 16k tokens, 0.5 to 0.6"},
    "h100": {},
}
# gemm: "maximum achievable matmul flops" of the hardware files. memory: STREAM-like copies reach 0.8 to 0.9. The
# rest: no figure at hand, mid-range.
STARTS = {
    "a100": Efficiency(
        name="a100", num_sms=108, gemm=0.85, gemm_fp8=0.6, attention=0.5, scores=0.6, memory=0.8, tensor_link=0.9,
        pipe_link=0.6, data_link=0.5, data_overlap=0.7, tensor_overlap=0.6, kernel_seconds=3e-6,
    ),
    "h100": Efficiency(
        name="h100", num_sms=132, gemm=0.75, gemm_fp8=0.6, attention=0.5, scores=0.6, memory=0.8, tensor_link=0.9,
        pipe_link=0.6, data_link=0.5, data_overlap=0.7, tensor_overlap=0.6, kernel_seconds=3e-6,
    ),
}  # fmt: skip
# GPUs of one type: the same chip with other memory
TYPES = {"a100": "a100", "a100-40gb": "a100", "h100": "h100", "h100-pcie": "h100", "h200": "h100"}
NUM_SMS = {"h100-pcie": 114}


def case_work(case: Case, start: Efficiency) -> StepWork:
    """The work of a case; where its row leaves choices open, of the fastest by the starting constants."""
    configs = case.choices or (case.config,)
    works = [step_work(case.shape, config, case.cluster, start) for config in configs]
    return min(works, key=lambda work: predicted_seconds(work, start))


def predicted_seconds(work: StepWork, efficiency: Efficiency) -> float:
    """The step of precomputed work."""
    pipeline, _, exposed, optimizer = step_parts(work, efficiency)
    return pipeline + exposed + optimizer


def fit(start: Efficiency, cases: Sequence[Case], works: Sequence[StepWork]) -> Efficiency:
    """Constants that fit `cases` best."""
    keys = [key for key in RANGES if key not in MEASURED[start.name]]
    low, high = np.array([RANGES[key] for key in keys]).T
    origin = (np.array([getattr(start, key) for key in keys]) - low) / (high - low)
    measured = np.log([case.seconds for case in cases])
    rows = {case.source: sum(c.source == case.source for c in cases) for case in cases}
    weights = np.sqrt([1 / max(10, rows[case.source]) for case in cases])

    def residuals(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        trial = _with_values(start, keys, low + scaled * (high - low))
        seconds = np.log([predicted_seconds(work, trial) for work in works])
        return np.concatenate([(seconds - measured) * weights, PULL * (scaled - origin)])

    inside = np.clip(origin, 1e-6, 1 - 1e-6)
    # soft_l1: rows that no model explains (repeat runs differ by up to 14%) must not bend the others
    result = least_squares(
        residuals, inside, bounds=(0, 1), loss="soft_l1", f_scale=0.03, max_nfev=40, xtol=1e-4, ftol=1e-5
    )
    return _with_values(start, keys, low + result.x * (high - low))


def _with_values(efficiency: Efficiency, keys: Sequence[str], values: npt.NDArray[np.float64]) -> Efficiency:
    return replace(efficiency, **{key: float(value) for key, value in zip(keys, values, strict=True)})
