"""Caches made while something could not be read: never taken for whole ones, and not for ever."""

import json
import os
import pathlib

import pytest
from documents import write_folder

from train import cache_build
from train.config import DataConfig
from train.data import load_corpus
from train.token_cache import CacheUnreadable, open_cache

LINES = "".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(20))


@pytest.fixture
def text(tmp_path):
    return write_folder(tmp_path / "text", {"a.jsonl": LINES, "b.jsonl": LINES})


def load(text, tmp_path, on_error):
    said = []
    data = DataConfig(path=str(text), cache=str(tmp_path / "cache"), on_error=on_error, seq_len=16, batch_size=1)
    return load_corpus(data, say=said.append), "\n".join(said)


def lock(monkeypatch, name):
    """Files of this name cannot be opened inside a `monkeypatch.context()`."""
    real = pathlib.Path.open

    def opened(path, *arguments, **options):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", opened)


def test_what_one_run_could_not_read_another_can(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        lock(patch, "b.jsonl")
        for expected in ("making", "made before"):
            short, said = load(text, tmp_path, "skip")
            assert expected in said and short.parts[0].num_skipped == 1
            assert len(short.train) + len(short.held_out) == 20
    whole, said = load(text, tmp_path, "skip")
    assert "lacks" in said and "b.jsonl', which can be read by now: another one is made" in said
    assert whole.parts[0].num_skipped == 0 and len(whole.train) + len(whole.held_out) == 40
    for on_error in ("skip", "raise"):
        again, said = load(text, tmp_path, on_error)
        assert "made before" in said and again.fingerprint == whole.fingerprint


def test_a_run_that_must_not_skip_makes_a_whole_cache(text, tmp_path, monkeypatch):
    """Also beside a short one, which another process may be reading."""
    with monkeypatch.context() as patch:
        lock(patch, "b.jsonl")
        short, _ = load(text, tmp_path, "skip")
    whole, said = load(text, tmp_path, "raise")
    assert "making" in said and len(whole.train) + len(whole.held_out) == 40
    assert len(short.train[0].tokens) > 0 and len(list((tmp_path / "cache").iterdir())) == 2


def test_damage_stays_damage(text, tmp_path):
    write_folder(tmp_path / "text", {"c.jsonl": "{\n" + LINES})
    for expected in ("making", "made before"):
        corpus, said = load(text, tmp_path, "skip")
        assert expected in said and corpus.parts[0].num_skipped == 1
    with pytest.raises(ValueError, match=r"c.jsonl', line 1: not JSON"):
        load(text, tmp_path, "raise")


def test_a_cache_that_must_not_be_read_is_not_made_anew(text, tmp_path, monkeypatch):
    """It may be sound, and another user's."""
    load(text, tmp_path, "raise")
    (folder,) = (tmp_path / "cache").iterdir()
    identity = (folder / "meta.json").stat().st_ino

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", refuse)
        with pytest.raises(CacheUnreadable, match=r"index.npz: Permission denied\); make it readable, bring its disk"):
            load(text, tmp_path, "raise")
    assert (folder / "meta.json").stat().st_ino == identity and len(open_cache(folder)) == 40


def test_a_document_without_a_token_is_no_empty_file(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    (tmp_path / "t.json").write_text(model.to_str())
    write_folder(tmp_path / "text", {"a.txt": "abab" * 20, "b.txt": "baba" * 20, "c.txt": "xyz", "d.txt": ""})
    data = DataConfig(
        path=str(tmp_path / "text"), cache=str(tmp_path / "cache"), tokenizer=str(tmp_path / "t.json"), seq_len=16,
        batch_size=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'c.txt': the tokenizer makes no token of its text; use another one"):
        load_corpus(data)


def test_what_a_host_with_a_longer_name_writes_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_build.socket, "gethostname", lambda: "node-1")
    theirs = tmp_path / f"{cache_build._partial_prefix(tmp_path / 'c')}0123"
    monkeypatch.setattr(cache_build.socket, "gethostname", lambda: "node")
    ours = tmp_path / f"{cache_build._partial_prefix(tmp_path / 'c')}4567"
    aside = tmp_path / f"{ours.name}.damaged"
    for path in (theirs, ours, aside):
        write_folder(path, {"lock": ""})
    os.remove(aside / "lock")
    cache_build._remove_abandoned(tmp_path / "c", lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == [theirs.name]
