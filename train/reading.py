"""Reading what may be damaged, from a store that may not answer.

What always holds: only content is called damaged. A store that does not answer, a permission that lacks, memory that is
full may pass; they are tried again, and then said to be what they are.
"""

import contextlib
import time
from collections.abc import Callable, Generator

from train import distributed
from train.errors import TryAgainError

_HALF_LINE = 200
_PAUSES_S = (0.5, 2.0, 8.0)  # before a read that failed is tried again

# What a read found, the worst of all processes counts.
READ, DAMAGED, UNREADABLE = range(3)
# Of tensorstore, which says with these words that it is not the content; EIO is UNKNOWN, ESTALE is ABORTED.
_NOT_THE_CONTENT = (
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
    "UNAVAILABLE", "UNKNOWN",
)  # fmt: skip


def try_to_read[T](read: Callable[[], T]) -> tuple[T | None, int, str]:
    """(what was read, how it went, why it went wrong). In a job of many processes another host may have written it a
    moment ago, so that not all of it shows."""
    for pause in (*_PAUSES_S, None):
        try:
            return read(), READ, ""
        except Exception as error:  # whatever a damaged file makes of the reader
            may_pass = _may_pass(error)
            if pause is None or (not may_pass and distributed.num_processes() == 1):
                return None, UNREADABLE if may_pass else DAMAGED, first_line(error)
            time.sleep(pause)
    raise AssertionError("the last pause is None")


@contextlib.contextmanager
def or_try_again(what: str) -> Generator[None]:
    """An `OSError` inside is that of a store that does not answer, which may pass.

    Raises:
      TryAgainError: in its place.
    """
    try:
        yield
    except OSError as error:
        raise TryAgainError(
            f"{what} cannot be read or written ({first_line(error)}); mend the store and start again with --resume"
        ) from error


def _may_pass(error: Exception) -> bool:
    """Whether a read failed for another reason than what is on disk."""
    if isinstance(error, OSError):
        return not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    return isinstance(error, MemoryError) or str(error).startswith(_NOT_THE_CONTENT)


def first_line(error: BaseException) -> str:
    """Kind and message of an error, in one line that is not too long."""
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec=")[0]
    if len(text) > 2 * _HALF_LINE:  # the path comes first, the reason last
        text = f"{text[:_HALF_LINE]} ... {text[-_HALF_LINE:]}"
    return f"{type(error).__name__}: {text}"
