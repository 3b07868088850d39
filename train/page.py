"""`report.html`: one page about a finished run, with nothing outside it.

What always holds: the page is one file without scripts or addresses; it can be mailed, and opened years later. All text
in it is escaped, because names of files and tokens are the user's.
"""

import html
import math
import pathlib
import time
from collections.abc import Iterable
from typing import Any

from train.alarms import read_alarms
from train.config import TrainConfig, to_json
from train.metrics import write_text
from train.plots import report_figures

REPORT_FILE = "report.html"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222 }
h1, h2 { font-weight: 600 } table { border-collapse: collapse; margin-bottom: 1em }
td, th { border-bottom: 1px solid #ddd; padding: .2em 1em .2em 0; text-align: left; vertical-align: top }
figure { display: inline-block; margin: 0 1em 1em 0; vertical-align: top } figcaption { font-weight: 600 }
img { max-width: 100% } .columns { display: flex; flex-wrap: wrap; gap: 0 3em }
"""


def save_report(
    run_dir: pathlib.Path,
    config: TrainConfig,
    rows: list[dict[str, Any]],
    summary: dict[str, Any],
    *,
    devices: str,
) -> None:
    """Write the page of a run from its rows of metrics and its summary; `devices` says how many of which kind."""
    alarms = [
        (alarm["step"], alarm["kind"], time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(alarm["time"])), alarm["text"])
        for alarm in read_alarms(run_dir)
    ]
    figures = "".join(
        f'<figure><figcaption>{html.escape(caption)}</figcaption><img alt="{html.escape(caption)}" src="{address}">'
        "</figure>"
        for caption, address in report_figures(rows)
    )
    parts = [
        f"<h1>{html.escape(run_dir.name)}</h1>",
        '<div class="columns">',
        "<div><h2>Results</h2>" + _table(("", ""), _flat(summary)) + "</div>",
        "<div><h2>Throughput</h2>" + _table(("", "median", "best", "worst"), _throughput(rows)) + "</div>",
        f"<div><h2>Mesh</h2><p>{html.escape(devices)}</p>"
        + _table(("axis", "size"), config.mesh.sizes().items())
        + "</div></div>",
        "<h2>Alarms</h2>" + (_table(("step", "kind", "time (UTC)", "what"), alarms) if alarms else "<p>none</p>"),
        f"<h2>Curves</h2>{figures}",
        "<h2>Configuration</h2>" + _table(("field", "value"), _flat(to_json(config))),
    ]
    title = html.escape(f"Run {run_dir.name}")
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    write_text(run_dir / REPORT_FILE, f"{head}</head><body>{''.join(parts)}</body></html>\n")


def _throughput(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Median, best and worst of what tells speed, without the first step, which compiled."""
    lines = []
    for name, more_is_better in (
        ("tokens_per_s", True), ("step_time_s", False), ("mfu", True), ("data_wait_s", False), ("padding_share", False)
    ):  # fmt: skip
        values = sorted(row[name] for row in rows[1:] if row.get(name) is not None)
        if values:
            ends = (values[-1], values[0]) if more_is_better else (values[0], values[-1])
            lines.append([name, *(_shown(value) for value in (values[len(values) // 2], *ends))])
    memory = [max(row["peak_memory_bytes"].values()) for row in rows if row.get("peak_memory_bytes")]
    if memory:
        lines.append(["peak memory of a device", f"{max(memory) / 1e9:.2f} GB", "", ""])
    return lines


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, value) of every leaf."""
    lines = []
    for name, value in values.items():
        lines += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", _shown(value))]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1e4 else f"{value:.5g}"


def _table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
