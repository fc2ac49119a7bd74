"""How does text reach a person? As it is: no `[word]` and no `:word:` in a name, a pattern or a file is markup."""

import io
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 120


class PlainConsole(Console):
    """A console that prints texts as they are; what is colored says so by its style."""

    def __init__(self, **more: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **more)


def plain_text(part: RenderableType) -> str:
    """What a console prints, as lines of 120 columns without colors; what is not to be wrapped may be longer."""
    buffer = io.StringIO()
    PlainConsole(file=buffer, width=WIDTH, color_system=None, force_terminal=False).print(part, crop=False)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
