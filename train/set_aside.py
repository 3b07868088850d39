"""Checkpoints that are in the way: damaged ones, and those of steps that run again after a return.

What always holds: none is deleted, none takes the place of another, and what became of each is said.
"""

import itertools
import os
import pathlib
from collections.abc import Collection

from train import distributed
from train.errors import TryAgainError
from train.reading import first_line


def set_aside(checkpoints: pathlib.Path, steps: Collection[int], folder: pathlib.Path) -> list[str]:
    """Move checkpoints into a folder, or to a name beside where that is impossible (no room, another disk).

    Returns:
      What became of each, in words.

    Raises:
      TryAgainError: one cannot be moved.
    """
    moved = [_move(checkpoints / str(step), folder) for step in steps] if distributed.is_main() else []
    became = distributed.from_main(moved)
    for step, (is_out, words) in zip(steps, became, strict=True):
        if not is_out:
            raise TryAgainError(
                f"the checkpoint {checkpoints / str(step)}, whose step runs again, cannot be moved out of the way "
                f"({words}); mend the store or move it yourself, and start again with --resume"
            )
    return [words for _, words in became]


def _move(path: pathlib.Path, folder: pathlib.Path) -> tuple[bool, str]:
    """Whether it is out of the way, and where it is, or why it could not be moved."""
    if not os.path.lexists(path):
        return True, "it is gone"
    problem = ""
    for wanted in (folder / path.name, path.with_name(f"{path.name}.incomplete")):
        try:
            wanted.parent.mkdir(exist_ok=True)
            place = _free(wanted)
            path.rename(place)
        except OSError as error:
            problem = problem or first_line(error)
        else:
            return True, f"moved to {place}"
    return False, problem


def _free(path: pathlib.Path) -> pathlib.Path:
    """The path, or the first of .1, .2, ... that nothing is at."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(place for place in itertools.chain([path], names) if not os.path.lexists(place))
