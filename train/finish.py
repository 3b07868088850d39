"""What a run leaves behind at its end: `summary.json`, `loss.png`, `report.html` and a sample.

What always holds: a picture or a page that cannot be written is said and counted, and keeps nothing else from being
written.
"""

import math
import statistics
from typing import Any

import jax
import numpy as np
from rich.console import Console

from train import distributed, metrics, page, report
from train.plots import save_loss_plot
from train.resume import Progress, Run
from train.sample import choose_prompt, continue_text
from train.state import reorder_layers, schedule_order
from train.unwritten import Unwritten
from train.watch import Watcher

_LARGEST_SAMPLED = 2_000_000_000


def finish(
    run: Run,
    console: Console,
    progress: Progress,
    watch: Watcher,
    unwritten: Unwritten,
    *,
    held_out_loss: float,
    bigram: float,
    failed_checkpoints: int,
) -> None:
    """Score, picture, `summary.json`, `report.html`; at last a sample, where one device can hold the parameters."""
    distributed.at("summary and sample", progress.step)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(progress.state.params))
    params = distributed.to_host(progress.state.params) if num_params <= _LARGEST_SAMPLED else None
    if not distributed.is_main():
        return
    rows, bytes_per_token = None, run.corpus.bytes_per_token
    with unwritten.attempt("summary.json"):
        rows = metrics.read_rows(run.run_dir)
    if rows is None:  # the store does not answer; `check_saved` says what to do
        return
    with unwritten.attempt("loss.png"):
        save_loss_plot(run.run_dir / "loss.png", rows, bigram_bits_per_byte=bigram, bytes_per_token=bytes_per_token)
    summary = {
        "step": progress.step,
        "held_out_loss": held_out_loss,
        "held_out_bits_per_byte": held_out_loss / math.log(2) / bytes_per_token,
        "bigram_bits_per_byte": bigram,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows) if rows else None,
        "num_params": num_params,
        "failed_checkpoints": failed_checkpoints,
        **watch.summary(rows),
    }
    with unwritten.attempt(page.REPORT_FILE):
        page.save_report(run.run_dir, run.config, rows, summary, devices=watch.devices)
    with unwritten.attempt("summary.json"):
        metrics.write_json(run.run_dir / "summary.json", summary | {"not_written": dict(unwritten.counts)})
    prompt, continuation = _sample(run, params, num_params)
    report.sum_up(console, summary, prompt=prompt, continuation=continuation, run_dir=run.run_dir)


def _sample(run: Run, params: Any, num_params: int) -> tuple[str, str]:
    """(held-out text, what the model makes of it)."""
    decode, prompt = run.corpus.tokenizer.decode, choose_prompt(run.corpus.held_out)
    if params is None:
        return decode(prompt), f"(no sample: {num_params:,} parameters are not gathered on one device)"
    params = reorder_layers(params, schedule_order(run.config), np.arange(run.config.model.num_layers))
    return decode(prompt), decode(continue_text(params, prompt, seed=run.config.seed))
