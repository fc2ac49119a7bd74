"""Which line of the user's own code does an error come from?"""

import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = Path(torch.__file__).parent
_OURS, _HERE = Path(__file__).parents[1], Path(__file__).parent
MODEL = str(_HERE / "loss.py")
"""The file that calls a model."""
_WRAPPERS = (
    *("torch/_tensor.py", "torch/overrides.py", "torch/functional.py", "torch/__init__.py"),
    "torch/_export/non_strict_utils.py",  # whose max and min stand for Python's while a trace is on
)
_STDLIB = Path(sysconfig.get_path("stdlib"))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_frame(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that is the user's; failing that, of a library that is not torch."""
    return user_and_library([frame for link in _chain(error) for frame in _frames(link.__traceback__)])


def files_of(error: BaseException) -> list[str]:
    """The files of all frames that an error passed."""
    return [name for link in _chain(error) for name, _ in _frames(link.__traceback__)]


def raising_frame(error: BaseException) -> FrameType:
    """The innermost frame of an error that is neither torch's nor ours nor Python's, or else the outermost."""
    assert error.__traceback__ is not None
    found, link = error.__traceback__.tb_frame, error.__traceback__
    while link is not None:
        if not is_machinery(Path(link.tb_frame.f_code.co_filename)):
            found = link.tb_frame
        link = link.tb_next  # type: ignore[assignment]
    return found


def frame_of_stack(text: str) -> str | None:
    """The same for a stack trace printed as text, as fx nodes carry it."""
    return user_and_library([(name, int(line)) for name, line in _FRAME.findall(text)])


def user_and_library(frames: list[tuple[str, int]]) -> str | None:
    """`innermost`, and in which library below it the frame is, if any."""
    foreign = [(Path(name), line) for name, line in frames if not name.startswith("<") and not is_machinery(Path(name))]
    place = innermost(frames)
    deepest = f"{foreign[-1][0]}:{foreign[-1][1]}" if foreign else None
    return place if place == deepest else f"{place} (in {deepest})"


def innermost(frames: list[tuple[str, int]]) -> str | None:
    """Of frames listed outermost first, the last one that is the user's own, or else any library's but torch.

    While a model runs, only what it runs counts: of a library's model, not the line that asked for its capture.
    """
    calls = [number for number, (name, _) in enumerate(frames) if name == MODEL]
    inside = frames[calls[-1] + 1 :] if calls else frames
    known = [(Path(name), line) for name, line in inside if not name.startswith("<")]
    foreign = [(path, line) for path, line in known if not is_machinery(path)]
    own = [(path, line) for path, line in foreign if "site-packages" not in path.parts]
    chosen = own or foreign
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else None


def asker() -> FrameType:
    """The frame that called something which is answered here; torch's own wrappers are left out."""
    frame = sys._getframe(1)
    while Path(frame.f_code.co_filename).parent == _HERE or frame.f_code.co_filename.endswith(_WRAPPERS):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def model_frame() -> FrameType | None:
    """The innermost frame of the model's own code that runs now; None where only the machinery around it does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_machinery(Path(frame.f_code.co_filename)):
        if frame.f_code.co_filename == MODEL:
            return None
        frame = frame.f_back
    return frame


def place_of(frame: FrameType | None) -> tuple[str, str]:
    """`file:line` of the user's innermost frame from here outwards, and that line in brackets."""
    frames: list[tuple[str, int]] = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    place = innermost(frames[::-1]) or "the model"
    name, _, line = place.rpartition(":")
    text = linecache.getline(name, int(line)).strip() if line.isdigit() else ""
    return place, f" ({text[:77] + '...' if len(text) > 80 else text})" if text else ""


def is_machinery(path: Path) -> bool:
    """Whether a file is torch's, ours, or of Python's library."""
    if path.is_relative_to(_TORCH) or path.is_relative_to(_OURS):
        return True
    return path.is_relative_to(_STDLIB) and "site-packages" not in path.parts


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, outermost last."""
    causes = []
    link: BaseException | None = error
    while link is not None and link not in causes:
        causes.append(link)
        link = link.__cause__ or link.__context__
    return reversed(causes)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next


def own_frame() -> str | None:
    """`file:line` of the user's code that runs now."""
    frames: list[tuple[str, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return innermost(frames[::-1])
