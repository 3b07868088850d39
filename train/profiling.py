"""`--profile 10:13`: a JAX trace of some steps, in the run directory.

What always holds: the trace begins before the first of its steps is dispatched and ends after the last one's results
are on the host, so it holds whole steps; and it is closed on every way out, because a trace that is left open is not
written. Named scopes of the model (`attention`, `mlp`, `head`, ...) name the operations; phases of the loop are host
events.
"""

import pathlib
import re
from types import TracebackType

import jax

from train.unwritten import Unwritten

PROFILE_FOLDER = "profile"


def parse_steps(text: str) -> range:
    """The steps of `FIRST:LAST`, both included.

    Raises:
      ValueError: it is no range of steps.

    Example:
      >>> parse_steps("10:13")
      range(10, 14)
    """
    match = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    if not match:
        raise ValueError(f"profile={text!r} must be FIRST:LAST, two step numbers; for example --profile 10:13")
    first, last = int(match[1]), int(match[2])
    if first < 1 or last < first:
        fixed = f"{max(min(first, last), 1)}:{max(first, last, 1)}"
        raise ValueError(f"profile={text!r} must have 1 <= FIRST <= LAST; for example --profile {fixed}")
    return range(first, last + 1)


def problems(text: str | None, num_steps: int) -> list[str]:
    """Why these steps cannot be profiled in a run of `num_steps`."""
    if text is None:
        return []
    try:
        steps = parse_steps(text)
    except ValueError as error:
        return [str(error)]
    if steps[-1] <= num_steps:
        return []
    fits = f"{min(steps[0], num_steps)}:{num_steps}"
    return [f"profile={text!r} must lie within the num_steps={num_steps} steps of the run; use --profile {fits}"]


class Profiler:
    """Starts and ends the trace as the steps go by."""

    def __init__(self, folder: pathlib.Path, text: str | None, *, unwritten: Unwritten | None = None):
        """Trace the steps of `text` (None: none) into `folder`; a trace that cannot be written is counted."""
        self._folder, self._unwritten = folder, unwritten or Unwritten()
        self._steps = parse_steps(text) if text else range(0)
        self._tracing = self._done = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def before(self, step: int) -> None:
        """To be called before step `step` is dispatched."""
        if step in self._steps and not self._tracing and not self._done:  # after a rollback steps come twice
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        if self._tracing:
            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()

    def after(self, step: int) -> None:
        """To be called when the results of step `step` are on the host."""
        if self._annotation:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._tracing and step >= self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is open."""
        if self._tracing:
            self._tracing, self._done = False, True
            with self._unwritten.attempt(PROFILE_FOLDER):
                try:
                    jax.profiler.stop_trace()
                except jax.errors.JaxRuntimeError as error:  # what XLA makes of a full disk
                    raise OSError(str(error)) from error

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
