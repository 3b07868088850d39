"""The text of a run: sources, the held-out split, caches, and text that is refused."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import fsspec
import pytest
from documents import write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from train import corpus as corpus_module
from train.config import DataConfig, SourceConfig
from train.corpus import split_by_name, split_tail, train_side
from train.data import Corpus, Document, Part, decode, encode, load_corpus


def config(path, **fields):
    return DataConfig(**{"path": path, "seq_len": 8, "batch_size": 1, "held_out_fraction": 0.25, **fields})


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
    assert all_files.parts[0].split_by == "file"


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
    assert corpus.parts[0].split_by == "tail"
    assert "the end of the only file" in corpus.summary(8)
    assert (train.name, held_out.name) == ("book.txt", f"book.txt (from byte {len(train)})")
    if text.startswith("a line"):
        assert train.tokens[-1] == ord("\n")


def test_a_folder_with_one_file_that_is_not_empty_holds_out_its_end(tmp_path):
    corpus = load_corpus(config(write_folder(tmp_path, {"a.txt": "a line of text\n" * 9, "b.txt": ""})))
    assert corpus.parts[0].split_by == "tail"
    assert corpus.parts[0].num_empty == 1
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
        part = Part(source="", train=documents[0], held_out=documents[1], split_by="file", num_empty=0)
        return Corpus(parts=(part,)).fingerprint

    variants = [
        ([("a", "xy"), ("b", "z")], [("c", "w")]),
        ([("a", "xy"), ("b", "Z")], [("c", "w")]),
        ([("a", "x"), ("b", "yz")], [("c", "w")]),
        ([("A", "xy"), ("b", "z")], [("c", "w")]),
        ([("a", "xy")], [("b", "z"), ("c", "w")]),
    ]
    assert len({fingerprint(*variant) for variant in variants}) == len(variants)
    assert fingerprint(*variants[0]) == fingerprint(*variants[0])


@pytest.mark.parametrize("is_folder", [True, False])
def test_fingerprint_does_not_depend_on_where_the_text_lies(tmp_path, monkeypatch, is_folder):
    files = {
        "b.txt": "a line of text\n" * 9,
        "a/c.txt": "another line\n" * 9,
        "a/b/d.txt": "third\n" * 9,
        "c": "x" * 30,
    }
    text = Path(write_folder(tmp_path / "text", files))
    (tmp_path / "link").symlink_to(text)
    monkeypatch.chdir(tmp_path)
    memory = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(str(text), f"{memory}/text", recursive=True)
    places = [
        str(text),
        "text",
        "./text/",
        "link",
        "text/../text",
        f"file://{text}",
        f"{memory}/text",
        f"{memory}/text/",
    ]
    if not is_folder:
        places = [f"{place.rstrip('/')}/b.txt" for place in places]
    found = {load_corpus(config(place, cache=cache)) for place in places for cache in (None, str(tmp_path / "cache"))}
    assert len({corpus.fingerprint for corpus in found}) == 1
    assert {corpus.parts[0].split_by for corpus in found} == {"file" if is_folder else "tail"}


def test_fingerprint_is_computed_once(tmp_path, monkeypatch):
    """Every checkpoint holds it, and it costs a pass over the text."""
    corpus, calls = load_corpus(config(write_folder(tmp_path, {f"{i}": "text\n" * 9 for i in range(9)}))), []
    digests = corpus_module._digests
    monkeypatch.setattr(corpus_module, "_digests", lambda documents: calls.append(1) or digests(documents))
    assert corpus.fingerprint == corpus.fingerprint
    assert len(calls) == 2, "training and held-out text"


@given(names=st.lists(st.text(max_size=3), min_size=1, max_size=9, unique=True), fraction=st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_the_training_side_of_a_stream_is_that_of_the_split(names, fraction):
    documents = [Document(name, encode("a line\n" * 9)) for name in names]
    if len(documents) > 1:
        train, _ = split_by_name(documents, fraction)
    else:
        train, _ = split_tail(documents[0], fraction, is_bytes=True)
    found = list(train_side(iter(documents), fraction))
    assert sorted(d.name for d in found) == sorted(d.name for d in train)
    assert sum(map(len, found)) == sum(map(len, train))


# ---- bad input ----


def sources(*places, **fields):
    return DataConfig(
        sources=tuple(SourceConfig(path=str(path), **more) for path, more in places),
        **{"seq_len": 8, "batch_size": 1, "held_out_fraction": 0.25, **fields},
    )


def test_sources_that_overlap_are_refused(tmp_path):
    """Each is split by names of its own: what one holds out the other would train on."""
    write_folder(tmp_path, {f"data/{i}.txt": "text\n" * 9 for i in range(5)} | {"data/code/a.py": "x = 1\n" * 9})
    (tmp_path / "link").symlink_to(tmp_path / "data" / "code" / "a.py")
    data = tmp_path / "data"
    for other in (data / "code", data / "code" / "a.py", tmp_path / "link", data, f"file://{data}/code"):
        with pytest.raises(ValueError, match=r"data.sources.0 \('.*/data'\) and data.sources.1 \('.*'\) both hold '/"):
            load_corpus(sources((data, {}), (other, {})))
    (tmp_path / "link").unlink()
    write_folder(tmp_path, {"more/b.py": "x = 1\n" * 9, "more/a.py": "x = 1\n" * 9})
    assert len(load_corpus(sources((data, {}), (tmp_path / "more", {}))).parts) == 2


def test_two_fields_of_the_same_rows_are_two_sources(tmp_path):
    lines = [json.dumps({"question": f"what is {i}?", "answer": f"{i}, that is what it is"}) for i in range(30)]
    write_folder(tmp_path, {"qa.jsonl": "\n".join(lines)})
    path, cache = tmp_path / "qa.jsonl", str(tmp_path / "cache")
    corpus = load_corpus(sources((path, {"field": "question"}), (path, {"field": "answer"}), cache=cache))
    held_out = [part.held_out.numbers.tolist() for part in corpus.parts]
    assert held_out[0] == held_out[1] != [], "a row lies on one side with all its fields"
    with pytest.raises(ValueError, match="both hold"):
        load_corpus(sources((path, {"field": "answer"}), (path, {"field": "answer"}), cache=cache))


def test_all_sources_that_are_missing_are_named(tmp_path):
    write_folder(tmp_path, {"a.txt": "text\n" * 99})
    with pytest.raises(ValueError, match=r"path='.*first' does not exist(.|\n)*path='.*second' does not exist"):
        load_corpus(sources((tmp_path / "first", {}), (tmp_path / "a.txt", {}), (tmp_path / "second", {})))


def test_a_path_beside_sources_is_refused(tmp_path):
    write_folder(tmp_path, {"a.txt": "text\n" * 99})
    with pytest.raises(ValueError, match=r"data.path='here' must be left out where data.sources names sources"):
        load_corpus(sources((tmp_path, {}), path="here"))


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


def test_what_cannot_be_read_is_counted_where_it_is_to_be_skipped(tmp_path):
    path = write_folder(tmp_path / "text", {f"{i}.txt": "a line of text\n" * 20 for i in range(4)})
    load_corpus(
        config(path, on_error="skip", cache=str(tmp_path / "cache"))
    )  # what is listed later is said all the same
    Path(path, "gone.txt").symlink_to(tmp_path / "nothing")
    for cache in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):
        corpus = load_corpus(config(path, on_error="skip", cache=cache))
        assert len(corpus.train) + len(corpus.held_out) == 4
        assert "1 things that cannot be read passed over:" in corpus.summary(8)
        assert "gone.txt' cannot be read (No such file or directory)" in corpus.summary(8)
    (tmp_path / "other").mkdir()
    Path(path, "gone.txt").rename(tmp_path / "other" / "gone.txt")
    with pytest.raises(ValueError, match=r"nothing that can be read, first: '.*gone.txt' cannot be read"):
        load_corpus(config(str(tmp_path / "other"), on_error="skip"))


def test_broken_link_and_pipe_are_named(tmp_path):
    path = write_folder(tmp_path, {"a.txt": "text\n" * 20})
    Path(path, "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"gone.txt' cannot be read \(No such file or directory\)"):
        load_corpus(config(path))
    Path(path, "gone.txt").unlink()
    for name in ("pipe", "pipe.jsonl", "pipe.parquet", "pipe.txt.gz"):
        os.mkfifo(Path(path, name))
        for place in (path, f"{path}/{name}"):
            with pytest.raises(ValueError, match=rf"{name}' is not a regular file; leave it out"):
                load_corpus(config(place))
        Path(path, name).unlink()


def test_long_documents_are_counted_or_refused(tmp_path):
    path = write_folder(tmp_path / "text", {f"f{i:02}.txt": "x" * 4 + "\n" * (i % 7 == 0) * 9 for i in range(40)})
    corpus = load_corpus(config(path))
    num_long = sum(len(document) > 8 for document in corpus.train)
    assert num_long
    assert f"{num_long:,} training documents longer than a row of 8 tokens, split into {2 * num_long} pieces" in (
        corpus.summary(8)
    )
    for cache in (None, str(tmp_path / "cache")):
        refuse = config(path, long_documents="refuse", cache=cache)
        message = r"6 of 40 documents are longer than data.seq_len=8 .*longest has 13: 'f00.txt' of .*-len 13 or .*skip"
        with pytest.raises(ValueError, match=message):
            load_corpus(refuse)
        left = load_corpus(dataclasses.replace(refuse, on_error="skip"))
        assert len(left.train) + len(left.held_out) == 34
        assert max(len(document) for document in [*left.train, *left.held_out]) <= 8
        assert "left out: 6 of 40 documents are longer than data.seq_len=8" in left.summary(8)
        with pytest.raises(ValueError, match=r"so none is left; use --data.seq-len 13 or"):
            load_corpus(dataclasses.replace(refuse, on_error="skip", seq_len=3))
    assert load_corpus(config(path, long_documents="refuse", seq_len=13)).fingerprint == corpus.fingerprint


def test_every_source_is_split_by_itself(tmp_path):
    """Also a single file, whose name alone might have put all of it on one side."""
    write_folder(tmp_path, {f"many/f{i:02}.txt": "some text\n" * 9 for i in range(20)} | {"one.txt": "a line\n" * 99})
    sources = tuple(SourceConfig(path=str(tmp_path / name)) for name in ("many", "one.txt"))
    corpus = load_corpus(DataConfig(sources=sources, seq_len=8, batch_size=1, held_out_fraction=0.25))
    assert [part.split_by for part in corpus.parts] == ["file", "tail"]
    assert len(corpus.train) == sum(len(part.train) for part in corpus.parts)
    assert corpus.train[-1].name == "one.txt"
    assert [document.name for document in corpus.held_out][-1].startswith("one.txt (from byte")
    with pytest.raises(IndexError):
        corpus.train[len(corpus.train)]
