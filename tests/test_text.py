"""Text as bytes, and Python's own sources, which a run without data reads."""

import sys
import time

import numpy as np
import pytest

from train import text as text_module
from train.config import DataConfig
from train.data import batches, decode, encode, load_corpus


def test_standard_library_is_text_enough_and_quick():
    start = time.process_time()
    corpus = load_corpus(DataConfig())
    next(batches(corpus.train, seq_len=2048, batch_size=4, seed=0))
    assert time.process_time() - start < 5
    train, held_out = ({document.name for document in side} for side in (corpus.train, corpus.held_out))
    assert not train & held_out
    names = train | held_out
    assert {"argparse.py", "json/decoder.py", "pydoc_data.topics/assert"} <= names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "encodings", "__pycache__"}
    assert "pydoc_data/topics.py" not in names
    assert not [name for name in names if "_sysconfigdata" in name]
    assert sum(map(len, corpus.train)) > 4_000_000
    assert 0.02 < sum(map(len, corpus.held_out)) / sum(map(len, corpus.train)) < 0.2


def test_standard_library_without_the_language_reference(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    names = [document.name for document in text_module.read_standard_library()]
    assert "argparse.py" in names
    assert not [name for name in names if name.startswith("pydoc_data.topics")]


def test_standard_library_that_is_not_on_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(text_module.sysconfig, "get_path", lambda name: str(tmp_path / "python313.zip"))
    with pytest.raises(ValueError, match=r"no source files in '.*python313.zip'.*--data.path"):
        text_module.read_standard_library()


def test_bytes_are_tokens():
    text = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{EURO SIGN}\n"
    assert decode(encode(text)) == text
    assert encode(text).dtype == np.uint8
    assert len(encode(text)) == len(text.encode())
    assert decode(np.array([104, 105, 0xFF], np.int32)) == "hi\N{REPLACEMENT CHARACTER}"
