"""Which transformers model does a config.json describe, and what does one call of it look like?"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.errors import ArgumentError, AutoparError, ModelSpecError
from autopar.models.overrides import apply_override
from autopar.values.choices import near
from autopar.values.precision import model_in_dtype
from autopar.values.schema import file_text, json_value

DEFAULT_BATCH = 8
DEFAULT_SEQ = 512
SEED = 0
# Names of transformers' tables from model type to class, first match first: an encoder-decoder is in several.
TASKS = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)


def load_hf(
    path: Path,
    *,
    batch: int | None,
    seq: int | None,
    dtype: torch.dtype,
    overrides: Mapping[str, str],
    device: torch.device,
) -> tuple[nn.Module, dict[str, Any], str]:
    """(model with seeded random weights, keywords of one training call, name).

    Raises:
        ModelSpecError: if there is no such config, or transformers has no model for it.
        ArgumentError: if an override or the sequence length does not fit the config.
    """
    with _offline():
        return _built(load_config(path, overrides), path, batch, seq, dtype, device)


@contextmanager
def _offline() -> Iterator[None]:
    """Inside, transformers fetches nothing that a config names."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


def _built(
    config: Any, path: Path, batch: int | None, seq: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, dict[str, Any], str]:
    """As `load_hf`."""
    cls = model_class(config, path)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # so that a model may keep chosen buffers in float32, as transformers does
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(SEED)
            model: nn.Module = cls(config)
    except Exception as error:
        raise ModelSpecError(f"{path}: transformers cannot build {cls.__name__} from this config: {error}") from error
    finally:
        torch.set_default_dtype(default)
    if dtype is torch.float64:
        model = model_in_dtype(model, dtype)
    try:
        return model.train(), example_inputs(model, config, batch, seq, dtype, device), cls.__name__
    except AutoparError:
        raise
    except Exception as error:
        raise ModelSpecError(f"{path}: no inputs can be made for {cls.__name__} of this config: {error}") from error


def load_config(path: Path, overrides: Mapping[str, str]) -> Any:
    """The config object of a config.json (or of the folder that holds it), with `--set` applied before it is built."""
    try:
        import transformers
    except ImportError as error:
        raise ModelSpecError("hf: models need transformers; install it with pip install 'autopar[hf]'") from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        beside = near(file.name, (one.name for one in file.parent.glob("*.json")))
        raise ModelSpecError(
            f"there is no {file}; give the path of a transformers config.json or of its folder{beside}"
        )
    remedy = "give the path of a transformers config.json"
    raw = json_value(file_text(file, ModelSpecError, remedy), str(file), ModelSpecError, remedy)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ModelSpecError(
            f"{file} has model_type {kind!r}, which transformers {transformers.__version__} does not know"
            f"{near(str(kind), transformers.CONFIG_MAPPING)}"
        )
    for key in ("attn_implementation", "_attn_implementation"):
        if raw.get(key) not in (None, "eager", "sdpa"):
            raise ModelSpecError(
                f"{file}: {key} {raw[key]!r:.60} would be fetched from a hub and run; write eager or sdpa"
            )
    cls = transformers.CONFIG_MAPPING[kind]
    try:
        known = cls(**raw).to_dict()
        for key, text in overrides.items():
            apply_override(raw, known, key, text)
        return cls(**raw)
    except ArgumentError:
        raise
    except Exception as error:
        raise ModelSpecError(f"{file}: transformers refuses this config: {error}") from error


def model_class(config: Any, path: Path) -> Any:
    """The class named under `architectures`, else the first training task that the model type has."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = config.architectures or ()
    for name in names if isinstance(names, list | tuple) else (names,):
        named = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
        raise ModelSpecError(f"{path}: transformers {transformers.__version__} has no model {name!r} (architectures)")
    for task in TASKS:
        name = getattr(modeling_auto, task).get(config.model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise ModelSpecError(
        f"{path}: model type {config.model_type!r} has no language, speech or image model; name a class under "
        '"architectures"'
    )


def example_inputs(
    model: nn.Module, config: Any, batch: int | None, seq: int | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Random valid inputs and labels of one call; shapes only on the meta device."""
    accepted = inspect.signature(model.forward).parameters
    batch = batch or DEFAULT_BATCH
    draw = _Draw(device=device, dtype=dtype)
    name = type(model).__name__
    if "labels" not in accepted:
        raise ModelSpecError(f"{name} takes no labels, so it has no loss; name a class with a head in architectures")
    kwargs: dict[str, Any] = {}
    if "pixel_values" in accepted and "input_ids" not in accepted:
        if seq is not None:
            raise ArgumentError(f"{name} reads images and has no sequence length; leave out seq {seq}")
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        kwargs["pixel_values"] = draw.normal(batch, config.num_channels, height, width)
        kwargs["labels"] = draw.integers(config.num_labels, batch)
    elif "input_features" in accepted:
        length = sequence_length(config, seq, "max_target_positions")
        kwargs["input_features"] = draw.normal(batch, config.num_mel_bins, 2 * config.max_source_positions)
        kwargs["labels"] = draw.integers(config.vocab_size, batch, length)
    elif "input_ids" in accepted and "pixel_values" not in accepted:
        length = sequence_length(config, seq, "max_position_embeddings")
        kwargs["input_ids"] = draw.integers(config.vocab_size, batch, length)
        if "SequenceClassification" in name:
            kwargs["labels"] = draw.integers(config.num_labels, batch)
        else:
            classes = config.num_labels if "TokenClassification" in name else config.vocab_size
            kwargs["labels"] = draw.integers(classes, batch, length)
    else:
        raise ModelSpecError(f"{name}: inputs can be made for text, image or speech models; write a file.py:function")
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    return kwargs


def sequence_length(config: Any, seq: int | None, limit_key: str) -> int:
    """`seq`, or what fits the model if it is not given."""
    limit = getattr(config, limit_key, None)
    if seq is None:
        return min(DEFAULT_SEQ, limit or DEFAULT_SEQ)
    if limit is not None and seq > limit:
        raise ArgumentError(
            f"sequence length {seq} exceeds the model's {limit_key} {limit}; use --set {limit_key}={seq}"
        )
    return seq


def assumed_sizes(kwargs: Mapping[str, Any], batch: int | None, seq: int | None) -> tuple[str, ...]:
    """What `example_inputs` chose where `batch` or `seq` is None, in words, each with the option that gives it."""
    tokens = kwargs.get("input_ids", kwargs["labels"] if "input_features" in kwargs else None)
    said = []
    if seq is None and tokens is not None:
        said.append(f"sequence length {tokens.shape[1]} (--seq)")
    if batch is None:
        said.append(f"global batch {kwargs['labels'].shape[0]} (--global-batch)")
    return tuple(said)


class _Draw:
    """Seeded inputs: the same on every rank and in every run."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = None if device.type == "meta" else torch.Generator().manual_seed(SEED)

    def integers(self, high: int, *shape: int) -> Tensor:
        if self.generator is None:
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        if self.generator is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)
