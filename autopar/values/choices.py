"""Is a word one of a closed set? What is not is said with the set, and with the words that are near to it."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from autopar.errors import ArgumentError

NEAR = 0.5
"""The part of their letters that near words share (difflib's ratio). With 0.7 `dpp` is not near to `ddp` any more; with
0.3 everything is near to something."""
LONGEST = 60
"""Letters of a word that are compared; difflib takes their square."""


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?`, or nothing if no known word is close."""
    close = near_words(word, known)
    return f"; did you mean {', '.join(close)}?" if close else ""


def near_words(word: str, known: Iterable[str]) -> list[str]:
    """Up to three known words that are close, the closest first; the word alone if it is known."""
    names = list(dict.fromkeys(known))
    if word in names:
        return [word]
    folded = {name.lower(): name for name in reversed(names)}
    return [folded[name] for name in get_close_matches(word[:LONGEST].lower(), folded, n=3, cutoff=NEAR)]


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ArgumentError, naming the choices and what is near, if `value` is none of them."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise ArgumentError(f"unknown {what} {value!r}; choose one of {', '.join(names)}{near(str(value), names)}")
