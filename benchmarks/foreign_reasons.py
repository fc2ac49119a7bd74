"""Which models fail for one reason? An error without what is the model's own: paths, names, numbers."""

import re

OWN = (
    (r"(/[\w.+-]+)+\.py", "..."),
    (r"[\w/.-]+\.py:\d+", "..."),
    (r"0x[0-9a-f]+|\b\d+(\.\d+)?(e[-+]?\d+)?\b", "N"),
    (r"\b[us]N\b|\bu\d+\b", "u"),
    (r"\bN(, N)+\b", "N"),
)


def reason(said: str) -> str:
    """What is said, alike for models that fail alike."""
    for pattern, text in OWN:
        said = re.sub(pattern, text, said)
    return said
