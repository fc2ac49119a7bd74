"""What text does the demo learn? The source of Python's own standard library, which every machine has, byte by byte."""

import sysconfig
from pathlib import Path

import torch

Batch = dict[str, torch.Tensor]


def corpus(folder: Path | None = None) -> torch.Tensor:
    """Every `*.py` file right under `folder` (the standard library if None), in order of name: one uint8 vector.

    Raises FileNotFoundError where the library holds no source files (some minimal Pythons ship it zipped).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no *.py file in {folder}; use a Python that ships its library as source files")
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(text: torch.Tensor, *, num_steps: int, batch: int, sequence: int, seed: int = 0) -> list[Batch]:
    """`num_steps` global batches of windows drawn uniformly from `text`; equal arguments give equal batches.

    Each is `{"input_ids", "labels"}`, both int64 (batch, sequence) and equal: the model shifts labels by itself.
    Raises ValueError when the text is shorter than one window.
    """
    if len(text) < sequence:
        raise ValueError(f"windows of {sequence} bytes were asked of a text of {len(text)}; use a shorter sequence")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - sequence + 1, (num_steps, batch, 1), generator=generator)
    windows = text[starts + torch.arange(sequence)].long()
    return [{"input_ids": window, "labels": window.clone()} for window in windows]
