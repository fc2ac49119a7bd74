"""Each example trains on 4 ranks, resumes on 2, and has the losses of its framework alone."""

import importlib
import importlib.util
import os

import pytest

NEEDED = {
    "accelerate_loop": ("accelerate", "accelerate is not installed: pip install 'autopar[integrations]'"),
    "trainer_loop": ("accelerate", "accelerate is not installed: pip install 'autopar[integrations]'"),
    "lightning_loop": ("lightning", "lightning is not installed: pip install 'autopar[integrations]'"),
    "torchtitan_loop": (
        "torchtitan",
        "torchtitan is not installed: it wants other versions than autopar's own tools do, so give it an environment "
        "of its own (docs/how-to/torchtitan.md)",
    ),
}


@pytest.mark.skipif("AUTOPAR_INTEGRATIONS" not in os.environ, reason="takes minutes: make integrations")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(NEEDED))
def test_losses_are_those_of_the_framework_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    package, reason = NEEDED[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason)
    assert importlib.import_module(f"examples.integrations.{name}").main() == 0
    said = capsys.readouterr().out
    assert said.count("difference") >= 6
