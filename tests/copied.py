"""What ranks are copies of, beside modules: a process that has captured once, so that none of them begins anew."""

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from autopar.capture import capture
from tests.quick_export import quicken_export

tqdm.monitor_interval = 0  # no thread that copies lack
torch.set_num_threads(1)
quicken_export()
capture(torch.nn.Linear(2, 2), (torch.ones(2, 2),), loss_fn=lambda output: output.sum())
