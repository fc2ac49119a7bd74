"""Where is the model's file that a saved plan names? Beside the plan, so that both can move together.

A plan's file names the model's file relative to its own folder. What is moved as a whole is found; so is a model that
the current folder has, as where the plan was made.
"""

import os
from pathlib import Path

from autopar.errors import ModelSpecError


def _path_of(spec: str) -> tuple[str, str, str] | None:
    """What stands before the path, the path, what stands after it; None of a module, which has none."""
    if spec.startswith("hf:"):
        return "hf:", spec.removeprefix("hf:"), ""
    source, colon, function = spec.rpartition(":")
    return ("", source, colon + function) if source.endswith(".py") else None


def seen_from(spec: str, folder: Path) -> str:
    """A spec of the current folder as a file in `folder` names it. An absolute path stays one."""
    if (parts := _path_of(spec)) is None or Path(parts[1]).is_absolute():
        return spec
    before, path, after = parts
    try:
        return f"{before}{Path(os.path.relpath(path, folder.resolve())).as_posix()}{after}"
    except ValueError:  # on another drive, from where no relative path leads
        return f"{before}{Path(path).resolve().as_posix()}{after}"


def found_beside(spec: str, file: Path) -> str:
    """The spec that `file` (a plan's) names, as the current folder sees it.

    Raises:
        ModelSpecError: if there is no such file, with the places that were looked at.
    """
    if (parts := _path_of(spec)) is None:
        return spec
    before, path, after = parts
    places = list(dict.fromkeys((file.resolve().parent / path, Path(path).absolute())))
    for place in places:
        if place.exists():
            shown = place if Path(path).is_absolute() else Path(os.path.relpath(place))
            return f"{before}{shown.as_posix()}{after}"
    looked = " and no ".join(os.path.normpath(place) for place in places)
    raise ModelSpecError(
        f"{file} says that its model is {spec!r}, and there is no {looked}; move the model's file along with the plan, "
        f"or name it with --model {before}PATH{after}"
    )
