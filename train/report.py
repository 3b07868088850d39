"""What a run says about itself: the mesh, the sizes, and a live line of progress."""

import math
import pathlib
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from train.config import TrainConfig
from train.data import Corpus
from train.flops import pipeline_bubble

_AXES = {
    "data": "rows of the batch; every part has its own",
    "tensor": "heads and MLP columns of each layer",
    "pipeline": "consecutive layers; microbatches flow through",
    "sequence": "tokens of each row; keys and values travel the ring",
}
_NUM_PLAIN_LINES = 25


def introduce(
    console: Console, config: TrainConfig, corpus: Corpus, *, num_params: int, bigram: float, notes: list[str]
) -> None:
    """Say what is trained on what, before the first compilation."""
    table = Table(
        "axis", "size", "what it splits", title=f"mesh of {config.mesh.num_devices} devices", title_justify="left"
    )
    for axis, size in config.mesh.sizes().items():
        table.add_row(axis, str(size), _AXES[axis])
    console.print(table)

    data, mesh = config.data, config.mesh
    rows = data.batch_size // (mesh.data * config.num_microbatches * config.accumulate)
    pieces = f"{config.accumulate} pieces x " if config.accumulate > 1 else ""
    lines = [
        f"parameters: {num_params:,}",
        f"global batch = {data.batch_size:,} rows x {data.seq_len:,} = {config.tokens_per_step:,} tokens",
        f"  rows: {mesh.data} data x {pieces}{config.num_microbatches} microbatches x {rows}; "
        f"tokens of a row: {mesh.sequence} sequence devices x {data.seq_len // mesh.sequence:,} ({config.layout})",
        *_bubble_lines(config),
        f"{corpus.summary(data.seq_len)}",
        f"to beat: {bigram:.3f} bits per byte, a bigram model of the same training text on the same held-out text",
        *notes,
    ]
    for line in lines:
        console.print(line)


def _bubble_lines(config: TrainConfig) -> list[str]:
    """What the pipeline costs, where there is one, and how many microbatches would make it cheap."""
    stages, pieces = config.mesh.pipeline, config.num_microbatches
    if stages == 1:
        return []
    bubble = pipeline_bubble(stages, pieces, config.repeats)
    line = (
        f"  pipeline: each of {stages} stages waits {bubble:.1%} of a step, (p - 1) / (v m + p - 1) with m = {pieces}, "
        f"v = {config.repeats}"
    )
    enough = 4 * stages
    return [
        line
        if pieces >= enough
        else f"{line}; {pipeline_bubble(stages, enough, config.repeats):.1%} with {enough} microbatches"
    ]


def sum_up(console: Console, summary: dict[str, Any], *, prompt: str, continuation: str, run_dir: pathlib.Path) -> None:
    """Say what came out."""
    model, bigram = summary["held_out_bits_per_byte"], summary["bigram_bits_per_byte"]
    console.rule("held-out text, continued by the model")
    console.print(f"{_printable(prompt)}[[[{_printable(continuation)}]]]")
    console.rule()
    verdict = f"{bigram - model:.3f} below" if model < bigram else f"{model - bigram:.3f} above"
    console.print(f"held-out text: {model:.3f} bits per byte, {verdict} the bigram's {bigram:.3f}")
    mfu = f", {summary['mfu']:.1%} of the devices' peak (MFU)" if "mfu" in summary else ""
    if summary["tokens_per_s"] is not None:
        console.print(f"median speed: {summary['tokens_per_s']:,.0f} tokens/s{mfu}")
    raised = ", ".join(f"{count} {kind}" for kind, count in summary.get("alarms", {}).items() if count)
    skipped = summary.get("skipped_steps", 0)
    console.print(f"alarms: {raised or 'none'}; steps skipped: {skipped}")
    console.print(
        f"written to {run_dir}: report.html, loss.png, metrics.jsonl, summary.json, config.json, tensorboard/, "
        "checkpoints/"
    )


def _printable(text: str) -> str:
    """A model may sample control characters, which would be commands to the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


class StepReporter:
    """A live bar on a terminal, a line every few steps elsewhere."""

    def __init__(self, console: Console, *, first_step: int, num_steps: int):
        """Report steps `first_step` to `num_steps`, both included."""
        self._console = console
        self._num_steps = num_steps
        self._line_every = max(1, num_steps // _NUM_PLAIN_LINES)
        self._first_step = first_step
        self._started = 0.0
        self._num_skipped = 0
        self._bar = None
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("train", total=num_steps, completed=first_step - 1, text="compiling")

    def __enter__(self) -> "StepReporter":
        self._started = time.perf_counter()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, row: dict[str, Any]) -> None:
        """Say how step `step` went."""
        self._num_skipped += bool(row.get("skipped"))
        mfu = f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
        skipped = f"  {self._num_skipped} skipped" if self._num_skipped else ""
        text = (
            f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s{mfu}  {row['step_time_s']:.2f} s/step  "
            f"ETA {self._eta(step)}{skipped}"
        )
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif step % self._line_every == 0 or step in (self._first_step, self._num_steps):
            self._say(f"step {step}/{self._num_steps}  {text}")

    def held_out(self, step: int, loss: float) -> None:
        """Say what an evaluation found."""
        self._say(f"step {step}/{self._num_steps}  held-out loss {loss:.4f} = {loss / math.log(2):.3f} bits per token")

    def _say(self, text: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        self._console.print(text)
        self._console.file.flush()

    def _eta(self, step: int) -> str:
        """Time left, from the steps after the first, which compiled."""
        if step == self._first_step:
            self._started = time.perf_counter()
            return "-"
        seconds = (time.perf_counter() - self._started) / (step - self._first_step) * (self._num_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"{minutes}:{seconds:02d}"
