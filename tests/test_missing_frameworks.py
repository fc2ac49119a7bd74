"""Without its framework an integration says what to install."""

import importlib
import sys

import pytest

from autopar.errors import AutoparError, MissingPackageError


@pytest.mark.parametrize(
    ("module", "package"), [("accelerate", "accelerate"), ("lightning", "lightning"), ("spmd", "spmd_types")]
)
def test_what_to_install_is_said(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"autopar.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for held in [held for held in sys.modules if held.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, held)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"install it: pip install {package}") as raised:
        importlib.import_module(name)
    assert isinstance(raised.value, AutoparError) and isinstance(raised.value, ImportError)
    sys.modules.pop(name, None)
