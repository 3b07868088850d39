"""report.html: one file, whole, with every curve that was measured and nothing that could run."""

import base64
import math
import re
import time

from tiny_run import config

from train.alarms import AlarmLog
from train.config import MeshConfig
from train.page import save_report

SUMMARY = {"step": 30, "held_out_loss": 2.5, "num_params": 13_000_000, "alarms": {"loss_spike": 1}}


def rows(num=30):
    for step in range(1, num + 1):
        row = {"step": step, "loss": 5 - step / 10, "tokens_per_s": 1e4 * step, "step_time_s": 0.1, "lr": 1e-3}
        row |= {"grad_norm": 1.0, "param_norm": 30.0, "data_wait_s": 0.0, "padding_share": 0.02, "mfu": 0.4}
        if step % 10 == 0:
            row |= {"held_out_loss": 5.0, "held_out_loss_by_position": {"0": 5.0, "1": 4.0, "2": None}}
        if step == 7:
            row |= {"loss": None, "skipped": 1.0}
        row["peak_memory_bytes"] = {"0": 3_000_000_000, "1": 2_000_000_000}
        yield row


def images(page):
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]


def test_the_page_holds_curves_tables_and_alarms(tmp_path):
    AlarmLog(tmp_path, say=str).raise_alarm("loss_spike", 12, "loss <9> & more", loss=math.pi)
    run_config = config(mesh=MeshConfig(data=2, sequence=4), run_dir="<script>alert(1)</script>")
    save_report(tmp_path, run_config, list(rows()), SUMMARY, devices="8 x NVIDIA H200")
    page = (tmp_path / "report.html").read_text()
    assert len(images(page)) == 8
    assert all(image.startswith(b"\x89PNG") for image in images(page))
    for part in (
        "8 x NVIDIA H200",
        "<td>sequence</td><td>4</td>",
        "<td>optimizer.learning_rate</td><td>0.01</td>",
        "<td>num_params</td><td>13,000,000</td>",
        "<td>alarms.loss_spike</td><td>1</td>",
        "loss &lt;9&gt; &amp; more",
        "<td>tokens_per_s</td><td>160,000</td><td>300,000</td><td>20,000</td>",
        "<td>peak memory of a device</td><td>3.00 GB</td>",
        "by position in context",
        time.strftime("%Y-"),
    ):
        assert part in page, part
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!data:)', page), "nothing is fetched"


def test_a_run_of_one_step_without_measures(tmp_path):
    save_report(tmp_path, config(), [{"step": 1, "loss": None}], {}, devices="1 x cpu")
    page = (tmp_path / "report.html").read_text()
    assert len(images(page)) == 1
    assert "<h2>Alarms</h2><p>none</p>" in page
