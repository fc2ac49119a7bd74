"""Which model does a person mean? `file.py:function`, `module:function` or `hf:config.json`, with example inputs."""

from autopar.models.spec import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
