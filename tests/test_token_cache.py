"""The cache of tokens: the same rows as from memory, reused when nothing changed, made again when it is not whole."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from documents import assert_same_batch, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from train import token_cache
from train.config import DataConfig
from train.data import batches, held_out_batches, load_corpus
from train.readers import Damage, RawText
from train.token_cache import CacheDamaged, StoredDocuments, build_cache, open_cache
from train.tokenizer import ByteTokenizer

TEXTS = {f"f{i:02}.txt": f"text number {i}\n" * (1 + i * i) for i in range(20)}


def quiet(line):
    pass


def build(folder, texts, **changes):
    documents = [RawText(f"d{i}", text.encode()) for i, text in enumerate(texts)]
    damage = Damage(on_error="raise")
    return build_cache(folder, documents, **{"tokenizer": ByteTokenizer(), "damage": damage, "say": quiet, **changes})


def config(text, cache, **changes):
    fields = {"seq_len": 64, "batch_size": 2, "held_out_fraction": 0.3, **changes}
    return DataConfig(path=str(text), cache=cache, **fields)


def load(data):
    """(corpus, what was said)"""
    said = []
    return load_corpus(data, say=said.append), "\n".join(said)


@pytest.fixture
def text(tmp_path):
    write_folder(tmp_path / "text", {**TEXTS, "empty.txt": ""})
    return tmp_path / "text"


def test_rows_from_a_cache_are_those_from_memory(text, tmp_path):
    memory, _ = load(config(text, None))
    cached, said = load(config(text, str(tmp_path / "cache")))
    assert "tokens: making" in said
    assert (memory.is_cached, cached.is_cached) == (False, True)
    assert cached.fingerprint == memory.fingerprint
    assert cached.summary(64) == memory.summary(64)
    assert cached.parts[0].num_empty == 1
    assert cached.bytes_per_token == memory.bytes_per_token == 1.0
    sides = [
        [
            *batches(corpus, seq_len=64, batch_size=2, seed=1, num_epochs=1),
            *held_out_batches(corpus.held_out, seq_len=64, batch_size=2),
        ]
        for corpus in (memory, cached)
    ]
    for one, other in zip(*sides, strict=True):
        assert_same_batch(one, other)


def test_a_single_document_is_split_at_the_same_place(tmp_path):
    write_folder(tmp_path, {"text/book.txt": "a line of text\n" * 99})
    corpora = [load(config(tmp_path / "text", cache))[0] for cache in (None, str(tmp_path / "cache"))]
    for side in ("train", "held_out"):
        one, other = (getattr(corpus, side)[0].tokens for corpus in corpora)
        np.testing.assert_array_equal(one, other)
        (document,) = getattr(corpora[1], side)
        np.testing.assert_array_equal(document.read(3, 9), document.tokens[3:9])
        np.testing.assert_array_equal(document.read(len(document) - 2, len(document) + 5), document.tokens[-2:])
    assert corpora[1].bytes_per_token == 1.0


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    reads=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 45), st.integers(0, 45)), max_size=12),
)
@settings(max_examples=25, deadline=None)
def test_any_stretch_of_any_document_can_be_read(tmp_path_factory, lengths, reads):
    """With records of 7 tokens and files of 3 records, so that documents cross both."""
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(length)) for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "_CHUNK", 7)
        patch.setattr(token_cache, "_SHARD_RECORDS", 3)
        cache = build(tmp_path_factory.mktemp("cache") / "c", texts)
        documents = StoredDocuments(cache, np.arange(len(cache)))
        assert [document.tokens.tobytes().decode() for document in documents] == texts
        for index, start, stop in reads:
            which = index % len(texts)
            assert documents[which].read(start, stop).tobytes().decode() == texts[which][start:stop]


def test_a_cache_is_used_again_until_the_data_change(text, tmp_path):
    data = config(text, str(tmp_path / "cache"))
    first, _ = load(data)
    again, said = load(data)
    assert "made before" in said and "making" not in said
    assert again.fingerprint == first.fingerprint
    _, said = load(config(text, data.cache, held_out_fraction=0.6, seq_len=32))
    assert "made before" in said, "the split and the rows are not in the cache"
    changed = text / "f03.txt"
    changed.write_text(changed.read_text().replace("number", "NUMBER"))
    os.utime(changed, (1, 1))
    third, said = load(data)
    assert "making" in said
    assert third.fingerprint != first.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2, "the old one stays for runs that use it"


def cut(folder):
    (shard,) = folder.glob("*.array_record")
    shard.write_bytes(shard.read_bytes()[:-100])


def without_meta(folder):
    (folder / "meta.json").unlink()


def altered_index(folder):
    content = bytearray((folder / "index.npz").read_bytes())
    content[200] ^= 1
    (folder / "index.npz").write_bytes(content)


def no_json(folder):
    (folder / "meta.json").write_text("{")


def another_version(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "version": 0}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, r"tokens-00000.array_record has [\d,]+ bytes and should have"),
        (without_meta, "meta.json: No such file"),
        (altered_index, "index.npz was altered"),
        (no_json, "meta.json or index.npz cannot be read"),
        (another_version, "it has version 0"),
    ],
)
def test_a_cache_that_is_not_whole_is_made_again(text, tmp_path, damage, reason):
    data = config(text, str(tmp_path / "cache"))
    first, _ = load(data)
    (folder,) = (tmp_path / "cache").iterdir()
    damage(folder)
    with pytest.raises(CacheDamaged, match=reason):
        open_cache(folder)
    again, said = load(data)
    assert "is incomplete or damaged" in said and "made again" in said
    assert again.fingerprint == first.fingerprint
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_a_changed_byte_inside_a_record_is_found_when_it_is_read(text, tmp_path):
    corpus, _ = load(config(text, str(tmp_path / "cache")))
    (shard,) = (tmp_path / "cache").glob("*/*.array_record")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"the cache of tokens is damaged: '.*array_record', record \d+ .*delete the"):
        for _ in batches(corpus, seq_len=64, batch_size=2, seed=0, num_epochs=1):
            pass


def test_a_killed_build_leaves_nothing_that_counts_and_is_removed(text, tmp_path):
    data = config(text, str(tmp_path / "cache"))
    program = (
        "import os, sys; from train import token_cache, data, config\n"
        "token_cache._write_file = lambda *_: os.kill(os.getpid(), 9)\n"
        "data.load_corpus(config.DataConfig(path=sys.argv[1], cache=sys.argv[2], seq_len=64, batch_size=2))"
    )
    root = pathlib.Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", program, data.path, data.cache], cwd=root, timeout=120)
    assert done.returncode == -9
    (left,) = (tmp_path / "cache").iterdir()
    assert f".part-{socket.gethostname()}-" in left.name
    _, said = load(data)
    assert f"left half-written: {left}" in said
    assert "is incomplete" not in said
    assert [".part-" in path.name for path in (tmp_path / "cache").iterdir()] == [False]


def test_two_builds_at_once_end_with_one_cache(tmp_path):
    def slow():
        yield RawText("a", b"first")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_cache.os, "getpid", lambda: 1)
            build(tmp_path / "c", ["first", "second"])  # another process is quicker
        yield RawText("b", b"second")

    damage = Damage(on_error="raise")
    cache = build_cache(tmp_path / "c", slow(), tokenizer=ByteTokenizer(), damage=damage, say=quiet)
    assert len(cache) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_cache_that_cannot_be_written_is_said_so_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written to '.*file/c' \(.*name another folder with --data.cache"):
        build(tmp_path / "file" / "c", ["text"])

    def fail():
        yield RawText("a", b"text")
        raise OSError(28, "No space left on device")

    damage = Damage(on_error="raise")
    with pytest.raises(ValueError, match=r"\(No space left on device\); make room there"):
        build_cache(tmp_path / "c", fail(), tokenizer=ByteTokenizer(), damage=damage, say=quiet)
    assert not list(tmp_path.glob("c*"))


def test_what_was_skipped_is_counted_also_by_a_later_run_and_raises_when_it_must(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * 9}) for i in range(30)]
    lines[7] = lines[19] = '{"text": '
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    skip = config(tmp_path / "a.jsonl", str(tmp_path / "cache"), on_error="skip")
    for _ in range(2):
        corpus, _ = load(skip)
        assert corpus.parts[0].num_skipped == 2
        assert "2 things that cannot be read passed over:" in corpus.summary(64)
        assert "a.jsonl', line 8: not JSON" in corpus.summary(64)
        assert len(corpus.train) + len(corpus.held_out) == 28
    with pytest.raises(ValueError, match=r"a.jsonl', line 8: not JSON"):
        load(config(tmp_path / "a.jsonl", str(tmp_path / "cache")))
    (tmp_path / "b.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"no text that can be read: 1 things were passed over, the first: .*line 1"):
        load(config(tmp_path / "b.jsonl", str(tmp_path / "cache"), on_error="skip"))
