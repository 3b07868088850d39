"""Documents, the held-out split, packing, and the saved position of the data."""

import collections
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from train import data as data_module
from train import text as text_module
from train.config import DataConfig
from train.data import (
    Corpus,
    Document,
    batches,
    decode,
    encode,
    held_out_batches,
    load_corpus,
    padding_share,
    split_report,
)

SEQ_LEN = 16
LENGTHS = [1, 2, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 2 * SEQ_LEN, 2 * SEQ_LEN + 1, 5, 40, 7, 3, 100]
MISSING = -1


def make_documents(lengths=LENGTHS, seed=0, low=1):
    rng = np.random.default_rng(seed)
    return [Document(f"d{i}", rng.integers(low, 256, length).astype(np.uint8)) for i, length in enumerate(lengths)]


def expected_pieces(documents, seq_len):
    """Every (tokens, targets) piece of the documents, written out naively."""
    pieces = collections.Counter()
    for document in documents:
        tokens = [int(token) for token in document.tokens]
        targets = [*tokens[1:], MISSING]
        for start in range(0, len(tokens), seq_len):
            pieces[tuple(tokens[start : start + seq_len]), tuple(targets[start : start + seq_len])] += 1
    return pieces


def segments(batch):
    """(tokens, targets) of every segment of a batch, after checking how its rows are laid out."""
    for row in range(len(batch["tokens"])):
        tokens, targets, positions, ids = (
            batch[name][row].tolist() for name in ("tokens", "targets", "positions", "segment_ids")
        )
        runs = [(segment, len(list(run))) for segment, run in itertools.groupby(ids)]
        num_segments = len(runs) - (runs[-1][0] == 0)
        assert [segment for segment, _ in runs][:num_segments] == list(range(1, num_segments + 1)), "ids are 1, 2, ..."
        start = 0
        for segment, length in runs:
            part = slice(start, start + length)
            start += length
            if segment == 0:
                assert tokens[part] == [0] * length
                assert targets[part] == [MISSING] * length
                assert positions[part] == [0] * length
            else:
                assert positions[part] == list(range(length)), "positions restart at 0 in each segment"
                yield tuple(tokens[part]), tuple(targets[part])


def pieces_in(some_batches):
    return collections.Counter(piece for batch in some_batches for piece in segments(batch))


def assert_same_batch(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def write_folder(root, files):
    for name, content in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root)


def config(path, **fields):
    return DataConfig(**{"path": path, "seq_len": 8, "batch_size": 1, "held_out_fraction": 0.25, **fields})


# ---- packing ----


@pytest.mark.parametrize("seq_len", [1, 7, SEQ_LEN, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_epoch_holds_every_byte_and_target_exactly_once(seq_len, batch_size):
    documents = make_documents()
    epoch = list(batches(documents, seq_len=seq_len, batch_size=batch_size, seed=3, num_epochs=1))
    for batch in epoch:
        assert sorted(batch) == ["positions", "segment_ids", "targets", "tokens"]
        assert all(x.dtype == np.int32 and x.shape == (batch_size, seq_len) for x in batch.values())
    assert pieces_in(epoch) == expected_pieces(documents, seq_len)


@pytest.mark.parametrize("seq_len", [5, SEQ_LEN, 300])
def test_pairs_are_those_of_the_unpacked_documents(seq_len):
    """Splitting and packing lose no prediction and invent none."""
    documents = make_documents()
    expected = collections.Counter()
    for document in documents:
        expected.update(itertools.pairwise(document.tokens.tolist()))
    found = collections.Counter()
    for batch in batches(documents, seq_len=seq_len, batch_size=2, seed=0, num_epochs=1):
        scored = batch["targets"] != MISSING
        found.update(zip(batch["tokens"][scored].tolist(), batch["targets"][scored].tolist(), strict=True))
    assert found == expected


def test_token_zero_is_a_target_only_where_the_text_has_it():
    without = make_documents(low=1)
    for batch in batches(without, seq_len=SEQ_LEN, batch_size=3, seed=0, num_epochs=1):
        assert not (batch["targets"] == 0).any()
    having = [Document("zeros", np.zeros(SEQ_LEN + 4, np.uint8))]
    epoch = list(batches(having, seq_len=SEQ_LEN, batch_size=3, seed=0, num_epochs=1))
    assert sum((batch["targets"] == 0).sum() for batch in epoch) == SEQ_LEN + 3


def test_epochs_differ_in_order_and_each_is_complete(monkeypatch):
    monkeypatch.setattr(data_module, "_MAX_WINDOW_ROWS", 2)  # so that the rows are close to the order of the pieces
    documents = make_documents([SEQ_LEN] * 20)
    rows = [
        piece
        for batch in batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=0, num_epochs=3)
        for piece in segments(batch)
    ]
    assert collections.Counter(rows) == collections.Counter(
        {piece: 3 * count for piece, count in expected_pieces(documents, SEQ_LEN).items()}
    )
    epochs = [rows[start : start + 20] for start in (0, 20, 40)]
    assert [set(epoch) for epoch in epochs] == [set(rows)] * 3
    windows = [[set(epoch[start : start + 2]) for start in range(0, 20, 2)] for epoch in epochs]
    assert windows[0] != windows[1] != windows[2]


def test_endless_stream_loses_nothing_between_epochs(monkeypatch):
    """At the end of every window the pieces so far are whole epochs and a part of one more: counts differ by 1."""
    monkeypatch.setattr(data_module, "_MAX_WINDOW_ROWS", 3)
    documents = make_documents()
    expected = expected_pieces(documents, SEQ_LEN)
    assert set(expected.values()) == {1}
    stream = batches(documents, seq_len=SEQ_LEN, batch_size=1, seed=0)
    seen, num_windows = collections.Counter(), 0
    while seen.total() < 5 * expected.total():
        seen.update(segments(next(stream)))
        state = stream.get_state()
        if state["next_row"] == 0:
            num_windows += 1
            assert seen.total() == state["parent"]["next_index"]
            counts = [seen[piece] for piece in expected]
            assert max(counts) - min(counts) <= 1
    assert num_windows > 10
    assert seen.keys() == expected.keys()


def test_order_is_set_by_the_seed_alone():
    def first_batches(seed):
        other = batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=7)
        for batch in itertools.islice(batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=seed), 8):
            next(other)
            yield batch

    documents = make_documents()
    for first, second in zip(first_batches(5), first_batches(5), strict=True):
        assert_same_batch(first, second)
    tokens = {seed: np.stack([batch["tokens"] for batch in first_batches(seed)]) for seed in (0, 1, 2**40)}
    for one, other in itertools.combinations(tokens.values(), 2):
        assert not np.array_equal(one, other)


def test_seeds_do_not_share_epochs(monkeypatch):
    """Seed 1 must not begin with the second epoch of seed 0."""
    monkeypatch.setattr(data_module, "_MAX_WINDOW_ROWS", 1)
    documents = make_documents([SEQ_LEN] * 30)

    def order(seed):
        return [
            piece
            for batch in batches(documents, seq_len=SEQ_LEN, batch_size=1, seed=seed, num_epochs=2)
            for piece in segments(batch)
        ]

    assert order(0)[30:] != order(1)[:30]


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match=r"seed=-1 must not be negative"):
        batches(make_documents(), seq_len=4, batch_size=1, seed=-1)


@pytest.mark.parametrize(("window_rows", "stride"), [(1, 1), (3, 1), (64, 5)])
def test_saved_state_continues_with_the_same_batches(monkeypatch, window_rows, stride):
    """From every batch of three epochs: in the middle of a window, at its ends, and across the ends of epochs."""
    monkeypatch.setattr(data_module, "_MAX_WINDOW_ROWS", window_rows)
    documents = make_documents()
    arguments = {"seq_len": SEQ_LEN, "batch_size": 2, "seed": 11}
    num_batches = 3 * expected_pieces(documents, SEQ_LEN).total() // 2
    unbroken = batches(documents, **arguments)
    states, rest = [], []
    for _ in range(num_batches):
        states.append(json.dumps(unbroken.get_state()))
        rest.append(next(unbroken))
    for k, state in list(enumerate(states))[::stride]:
        restored = batches(documents, **arguments)
        next(restored)
        restored.set_state(json.loads(state))
        for expected in rest[k : k + 5]:
            assert_same_batch(next(restored), expected)


def test_reading_the_state_does_not_move_the_iterator():
    documents = make_documents()
    watched, plain = (batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=0) for _ in range(2))
    for _ in range(20):
        watched.get_state()
        assert_same_batch(next(watched), next(plain))


def test_batches_do_not_share_memory():
    stream = batches(make_documents(), seq_len=SEQ_LEN, batch_size=2, seed=0)
    first = next(stream)
    kept = {name: x.copy() for name, x in first.items()}
    for batch in itertools.islice(stream, 10):
        for x in batch.values():
            x[...] = -5
    assert_same_batch(first, kept)


def test_split_report():
    report = split_report(make_documents([1, SEQ_LEN, SEQ_LEN + 1, 3 * SEQ_LEN]), seq_len=SEQ_LEN)
    assert (report.num_documents, report.num_split, report.num_split_pieces, report.num_pieces) == (4, 2, 5, 7)


def test_padding_share():
    batch = {"segment_ids": np.array([[1, 1, 2, 0], [1, 0, 0, 0]])}
    full = {"segment_ids": np.ones((2, 4))}
    assert padding_share([batch]) == 0.5
    assert padding_share([batch, full]) == 0.25
    assert padding_share([]) == 0.0


def test_padding_is_small_on_documents_of_mixed_length():
    documents = make_documents(np.random.default_rng(0).integers(1, 2000, 300))
    assert padding_share(batches(documents, seq_len=256, batch_size=4, seed=0, num_epochs=1)) < 0.04


# ---- held-out batches ----


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_held_out_batches_score_every_target_once_and_never_change(batch_size):
    documents = make_documents()
    held_out = held_out_batches(documents, seq_len=SEQ_LEN, batch_size=batch_size)
    first, second = list(held_out), list(held_out)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert_same_batch(one, other)
    assert all(x.shape == (batch_size, SEQ_LEN) for batch in first for x in batch.values())
    assert pieces_in(first) == expected_pieces(documents, SEQ_LEN)
    num_targets = sum(int((batch["targets"] != MISSING).sum()) for batch in first)
    assert num_targets == sum(len(document) - 1 for document in documents)


def test_last_held_out_batch_is_filled_with_rows_of_padding():
    (batch,) = held_out_batches(make_documents([SEQ_LEN] * 3), seq_len=SEQ_LEN, batch_size=5)
    assert (batch["segment_ids"] != 0).any(axis=1).sum() == 3
    assert not batch["segment_ids"][3:].any()
    assert (batch["targets"][3:] == MISSING).all()


# ---- the held-out split ----


def test_split_by_file_depends_on_the_name_alone(tmp_path):
    files = {f"f{i:02}.txt": f"text number {i}\n" for i in range(60)}
    few = dict(list(files.items())[:40])
    all_files = load_corpus(config(write_folder(tmp_path / "all", files)))
    some_files = load_corpus(config(write_folder(tmp_path / "some", dict(reversed(few.items())))))
    below = {name for name in files if int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 2**64 < 0.25}
    assert {document.name for document in all_files.held_out} == below
    assert {document.name for document in some_files.held_out} == below & few.keys()
    assert {document.name for document in all_files.train} == files.keys() - below
    assert 5 < len(below) < 25
    assert all_files.split_by == "file"


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("num_files", [2, 3])
def test_split_by_file_leaves_neither_side_empty(tmp_path, fraction, num_files):
    path = write_folder(tmp_path, {f"{i}.txt": "a line of text\n" for i in range(num_files)})
    corpus = load_corpus(config(path, held_out_fraction=fraction))
    assert corpus.train
    assert corpus.held_out
    assert len(corpus.train) + len(corpus.held_out) == num_files
    if fraction == 0.001:
        assert len(corpus.held_out) == 1
    if fraction == 0.999:
        assert len(corpus.train) == 1


@pytest.mark.parametrize(
    "text",
    ["a line of text\n" * 40, "no line ends here " * 30, "\N{EURO SIGN}" * 201, "one long line " * 40 + "\nend\n"],
    ids=["lines", "one line", "wide characters", "a line end near the end"],
)
def test_a_single_file_holds_out_its_end(tmp_path, text):
    path = write_folder(tmp_path, {"book.txt": text})
    corpus = load_corpus(config(str(Path(path, "book.txt"))))
    (train,), (held_out,) = corpus.train, corpus.held_out
    assert decode(train.tokens) + decode(held_out.tokens) == text, "whole characters on both sides"
    assert 0.2 < len(held_out) / len(text.encode()) < 0.3
    assert corpus.split_by == "tail"
    assert "the end of the only file" in corpus.summary(8)
    assert (train.name, held_out.name) == ("book.txt", f"book.txt (from byte {len(train)})")
    if text.startswith("a line"):
        assert train.tokens[-1] == ord("\n")


def test_a_folder_with_one_file_that_is_not_empty_holds_out_its_end(tmp_path):
    corpus = load_corpus(config(write_folder(tmp_path, {"a.txt": "a line of text\n" * 9, "b.txt": ""})))
    assert corpus.split_by == "tail"
    assert corpus.num_empty == 1
    assert "1 empty files left out" in corpus.summary(8)


def test_folder_is_read_recursively_and_whole(tmp_path):
    files = {
        "a.txt": "first\n",
        "b/c.md": "second\r\n\ttext \N{EURO SIGN}\n",
        "b/d/e": "\N{BYTE ORDER MARK}third",
        "z.py": "x = 1\n",
    }
    write_folder(tmp_path, {**files, ".git/config": b"\0", ".hidden": b"\0", "b/__pycache__/x.pyc": b"\0"})
    corpus = load_corpus(config(str(tmp_path), seq_len=2))
    assert {document.name: document.tokens.tobytes() for document in corpus.train + corpus.held_out} == {
        name: text.encode() for name, text in files.items()
    }


def test_linked_files_are_read_once(tmp_path):
    """Otherwise the same text could be trained on and held out, and a link to a parent would never end."""
    write_folder(tmp_path / "data", {"a.txt": "the first text\n", "sub/b.txt": "the second text\n"})
    write_folder(tmp_path / "elsewhere", {"c.txt": "the third text\n"})
    Path(tmp_path, "data", "again.txt").symlink_to(tmp_path / "data" / "a.txt")
    Path(tmp_path, "data", "sub", "loop").symlink_to(tmp_path / "data")
    Path(tmp_path, "data", "linked").symlink_to(tmp_path / "elsewhere")
    corpus = load_corpus(config(str(tmp_path / "data")))
    names = sorted(document.name for document in corpus.train + corpus.held_out)
    assert names == ["a.txt", "linked/c.txt", "sub/b.txt"]


def test_fingerprint_changes_with_any_byte_name_or_side():
    def fingerprint(train, held_out):
        documents = [[Document(name, encode(text)) for name, text in side] for side in (train, held_out)]
        corpus = Corpus(source="", train=documents[0], held_out=documents[1], split_by="file", num_empty=0)
        return corpus.fingerprint

    variants = [
        ([("a", "xy"), ("b", "z")], [("c", "w")]),
        ([("a", "xy"), ("b", "Z")], [("c", "w")]),
        ([("a", "x"), ("b", "yz")], [("c", "w")]),
        ([("A", "xy"), ("b", "z")], [("c", "w")]),
        ([("a", "xy")], [("b", "z"), ("c", "w")]),
    ]
    assert len({fingerprint(*variant) for variant in variants}) == len(variants)
    assert fingerprint(*variants[0]) == fingerprint(*variants[0])


# ---- bad input ----


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nowhere", r"data\.path='.*nowhere' does not exist; give a text file or a folder"),
        ({"sub/.keep": "x"}, "sub", r"data\.path='.*sub' is a folder without files; put text files into it"),
        ({"a.txt": ""}, "a.txt", r"holds no text: 'a.txt' is empty; give a file"),
        ({"a.txt": "", "b.txt": ""}, ".", r"holds no text: 'a.txt' is empty and so are the other 1 files"),
        ({"good.txt": "text", "x/bad.bin": b"ab\0c"}, ".", r"not text: '.*x/bad.bin' \(NUL byte at offset 2\);.*iconv"),
        (
            {"latin.txt": "caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1")},
            "latin.txt",
            r"not text: '.*latin.txt' \(not UTF-8 at offset 3\)",
        ),
        ({f"{i}.png": b"\0" for i in range(8)}, ".", r"4.png' \(NUL byte at offset 0\) and 3 more;"),
        (
            {"a.txt": "only a few bytes"},
            "a.txt",
            r"has \d+ bytes in 1 documents, but one batch takes .* = 4 \* 8 = 32; lower",
        ),
        ({f"{i}": "x" for i in range(64)}, ".", r"the training text .* has no document of 2 bytes or more"),
    ],
    ids=["missing", "empty folder", "empty file", "empty files", "binary", "latin-1", "many", "small", "no targets"],
)
def test_bad_text_is_refused(tmp_path, files, path, message):
    write_folder(tmp_path, files)
    with pytest.raises(ValueError, match=message):
        load_corpus(config(str(Path(tmp_path, path)), batch_size=4))


def test_held_out_text_without_a_target_is_refused(tmp_path):
    path = write_folder(tmp_path, {"f00.txt": "some lines of text\n" * 9, "f04.txt": "some lines of text\n" * 9})
    held_out = load_corpus(config(path)).held_out[0].name
    Path(path, held_out).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"the held-out text .* has no document of 2 bytes or more"):
        load_corpus(config(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"held_out_fraction": 0.0}, r"held_out_fraction=0.0 must be above 0"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction=1.0 must be .* below 1"),
        ({"held_out_fraction": float("nan")}, r"held_out_fraction=nan"),
        ({"seq_len": 0}, r"data.seq_len=0 must be at least 1"),
        ({"batch_size": -2}, r"data.batch_size=-2 must be at least 1"),
        ({"path": ""}, r"data.path='' does not exist"),
    ],
)
def test_bad_fields_are_refused(tmp_path, fields, message):
    path = write_folder(tmp_path, {"a.txt": "text\n" * 100, "b.txt": "text\n" * 100})
    with pytest.raises(ValueError, match=message):
        load_corpus(config(**{"path": path, **fields}))


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write_folder(tmp_path, {"a.txt": "text\n", "secret.txt": "text\n"})
    read_bytes = Path.read_bytes

    def refuse(self):
        if self.name == "secret.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"secret.txt' cannot be read \(Permission denied\); make it readable"):
        load_corpus(config(path))


def test_unreadable_subfolder_is_named(tmp_path, monkeypatch):
    """os.walk passes over such folders in silence by default."""
    path = write_folder(tmp_path, {"a.txt": "text\n" * 20, "locked/b.txt": "text\n"})
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"locked' cannot be read \(Permission denied\)"):
        load_corpus(config(path))


def test_broken_link_and_pipe_are_named(tmp_path):
    path = write_folder(tmp_path, {"a.txt": "text\n" * 20})
    Path(path, "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"gone.txt' cannot be read \(No such file or directory\)"):
        load_corpus(config(path))
    Path(path, "gone.txt").unlink()
    os.mkfifo(Path(path, "pipe"))
    with pytest.raises(ValueError, match=r"pipe' is not a regular file; leave it out"):
        load_corpus(config(path))


# ---- Python's own sources ----


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
