"""The cache of tokens: the same rows as from memory, reused when nothing changed, made again when it is not whole."""

import fcntl
import io
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys

import numpy as np
import pytest
import tiny_run
from documents import assert_same_batch, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from train import cache_build, loop, token_cache
from train.cache_build import build_cache
from train.config import DataConfig
from train.data import batches, held_out_batches, load_corpus
from train.readers import Damage, DataError, RawText
from train.token_cache import CacheDamaged, StoredDocuments, open_cache
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
    assert corpora[0].fingerprint == corpora[1].fingerprint


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    reads=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 45), st.integers(0, 45)), max_size=12),
)
@settings(max_examples=25, deadline=None)
def test_any_stretch_of_any_document_can_be_read(tmp_path_factory, lengths, reads):
    """With records of 7 tokens and files of 3 records, so that documents cross both."""
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(length)) for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "CHUNK", 7)
        patch.setattr(cache_build, "CHUNK", 7)
        patch.setattr(cache_build, "_SHARD_RECORDS", 3)
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


def test_a_cache_among_the_text_is_refused(text):
    """The next run would read it."""
    for place in (text, f"file://{text}"):
        with pytest.raises(ValueError, match=r"data.cache='.*/text/sub/cache' lies in data.path='.*/text', so its fi"):
            load(config(place, str(text / "sub" / "cache")))
    hidden = config(text, str(text / ".cache"))
    assert load(hidden)[0].fingerprint == load(hidden)[0].fingerprint


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
    with pytest.raises(DataError, match=r"the cache of tokens is damaged: '.*array_record', record \d+ .*delete the"):
        for _ in batches(corpus, seq_len=64, batch_size=2, seed=0, num_epochs=1):
            pass


def test_a_file_that_is_gone_is_not_called_damaged(text, tmp_path):
    corpus, _ = load(config(text, str(tmp_path / "cache")))
    (shard,) = (tmp_path / "cache").glob("*/*.array_record")
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(
        DataError, match=r"cannot be read: '.*array_record' \(No such file or directory\); bring its disk"
    ):
        next(batches(corpus, seq_len=64, batch_size=2, seed=0))
    (tmp_path / "elsewhere").rename(shard)
    next(batches(corpus, seq_len=64, batch_size=2, seed=0))


def test_a_run_whose_cache_goes_away_ends_with_the_reason(text, tmp_path):
    """Here before the first step; a thread that reads ahead raises the same (`tests/test_prefetch.py`)."""
    run_config = tiny_run.config(data=config(text, str(tmp_path / "cache")), run_dir=str(tmp_path / "run"))
    run = loop.prepare(run_config, resume_command="")
    (shard,) = (tmp_path / "cache").glob("*/*.array_record")
    shard.unlink()
    with pytest.raises(DataError, match=r"cannot be read: '.*array_record' \(No such file or directory\)"):
        loop.train(run, Console(file=io.StringIO()))


def many_files(folder, monkeypatch, num_files=12):
    """A cache with a file for each document."""
    monkeypatch.setattr(cache_build, "_SHARD_RECORDS", 1)
    cache = build(folder, [f"document {number}" for number in range(num_files)])
    assert len(list(folder.glob("*.array_record"))) == num_files
    return cache


def test_a_bounded_number_of_files_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_open_readers", token_cache._OpenReaders(3))
    cache = many_files(tmp_path / "c", monkeypatch)
    num_open = len(os.listdir("/proc/self/fd"))
    for number in [*range(12), *reversed(range(12))]:
        assert cache.read(number, 0, 99).tobytes().decode() == f"document {number}"
        assert len(token_cache._open_readers) <= 3
    assert len(os.listdir("/proc/self/fd")) <= num_open + 3
    assert 1 <= token_cache._open_limit() <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def test_too_many_open_files_are_not_called_damage(tmp_path, monkeypatch):
    cache = many_files(tmp_path / "c", monkeypatch, num_files=2)
    cache.read(0, 0, 9)  # what reading loads is loaded
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be read: .*Too many open files\).*raise `ulimit -n`"):
            cache.read(1, 0, 9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert cache.read(1, 0, 99).tobytes() == b"document 1"


def test_a_killed_build_leaves_nothing_that_counts_and_is_removed(text, tmp_path):
    data = config(text, str(tmp_path / "cache"))
    program = (
        "import os, sys; from train import cache_build, data, config\n"
        "cache_build._write_file = lambda *_: os.kill(os.getpid(), 9)\n"
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


def test_what_a_process_of_the_same_number_left_is_in_nobodys_way(tmp_path):
    """As in a container, where every process is number 1 and the name of the machine is the same after a restart."""
    left, alive = (tmp_path / f"c.part-{socket.gethostname()}-{name}" for name in (os.getpid(), "alive"))
    for folder in (left, alive):
        write_folder(folder, {"lock": "", "tokens-00000.array_record": b"x" * 99})
    said = []
    with (alive / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert len(build(tmp_path / "c", ["text"], say=said.append)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", alive.name]
    assert said == [f"removed a cache of tokens that was left half-written: {left}"]


def test_two_builds_at_once_end_with_one_cache(tmp_path):
    def slow():
        yield RawText("a", b"first")
        build(tmp_path / "c", ["first", "second"])  # another process is quicker, and takes nobody's files away
        yield RawText("b", b"second")

    damage = Damage(on_error="raise")
    cache = build_cache(tmp_path / "c", slow(), tokenizer=ByteTokenizer(), damage=damage, say=quiet)
    assert len(cache) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("was_damaged", [False, True])
def test_a_cache_that_appears_in_the_last_moment_stays(tmp_path, monkeypatch, was_damaged):
    """Another process may read it already: after the look that found none, or before this one takes the name."""
    if was_damaged:
        write_folder(tmp_path, {"c/meta.json": "{"})
    rename, look, placed = pathlib.Path.rename, cache_build.open_cache, []
    build(tmp_path / "other", ["text"])

    def place():
        if not placed and not (tmp_path / "c").exists():
            placed.append(True)
            rename(tmp_path / "other", tmp_path / "c")

    def look_late(folder):
        try:
            return look(folder)
        finally:
            place()

    def rename_late(path, target):
        if target == tmp_path / "c":
            place()
        return rename(path, target)

    monkeypatch.setattr(cache_build, "open_cache", look_late)
    monkeypatch.setattr(pathlib.Path, "rename", rename_late)
    identity = (tmp_path / "other" / "meta.json").stat().st_ino
    assert len(build(tmp_path / "c", ["text"])) == 1
    assert placed and (tmp_path / "c" / "meta.json").stat().st_ino == identity
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
