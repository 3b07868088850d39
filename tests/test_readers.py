"""Readers: every kind of file gives the same documents, and what is damaged is named by file and place."""

import gzip
import json
import os

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python import array_record_module
from documents import write_folder

from train.readers import Damage, list_files, read_documents

TEXTS = ["the first text", "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{EURO SIGN}\nof two lines", "", "the last one"]


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def parquet(path, texts, column="text", compression="zstd"):
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=2, compression=compression, write_page_checksum=True)


def array_record(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record if isinstance(record, bytes) else record.encode())
    writer.close()


def zst(content, frame=40):
    """Several frames, one after the other, as tools that compress in parallel write them."""
    parts = [content[start : start + frame] for start in range(0, len(content), frame)]
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


def read(path, field="text", on_error="raise"):
    damage = Damage(on_error=on_error)
    documents = list(read_documents(list_files(str(path)), field=field, damage=damage))
    return documents, damage.skipped


def make(folder, kind):
    """A file of this kind with TEXTS."""
    path = folder / f"a.{kind}"
    if kind == "parquet":
        parquet(path, TEXTS)
    elif kind == "array_record":
        array_record(path, TEXTS)
    else:
        compress = {"jsonl": bytes, "ndjson.gz": gzip.compress, "jsonl.zst": zst}[kind]
        path.write_bytes(compress(jsonl(TEXTS)))
    return path


KINDS = ["jsonl", "ndjson.gz", "jsonl.zst", "parquet", "array_record"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remote", [False, True], ids=["path", "fsspec"])
def test_every_kind_gives_the_same_documents(tmp_path, kind, remote):
    path = make(tmp_path, kind)
    where = str(path)
    if remote:
        where = f"memory://{tmp_path.name}/{path.name}"
        with fsspec.open(where, "wb") as copy:
            copy.write(path.read_bytes())
    documents, skipped = read(where)
    assert [(name, content.decode()) for name, content in documents] == [
        (f"a.{kind}:{number}", text) for number, text in enumerate(TEXTS, 1)
    ]
    assert skipped == []


def test_a_folder_is_read_by_kind_and_in_the_order_of_its_names(tmp_path):
    write_folder(tmp_path, {"c.txt": "third", "b/x.jsonl": jsonl(["second"]), "b/y.txt.gz": gzip.compress(b"zipped")})
    parquet(tmp_path / "a.parquet", ["fourth"])
    local, _ = read(tmp_path)
    assert [name for name, _ in local] == ["a.parquet:1", "c.txt", "b/x.jsonl:1", "b/y.txt.gz"]
    assert dict(local)["b/y.txt.gz"] == b"zipped"
    remote, _ = read(f"file://{tmp_path}")
    assert sorted(remote) == sorted(local)


def test_a_stamp_changes_with_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    for where in (str(path), f"file://{path}"):
        (before,) = list_files(where)
        os.utime(path, (1, path.stat().st_mtime + 7))
        (after,) = list_files(where)
        assert before.stamp != after.stamp


def damaged(folder, name):
    """(file, message, documents that can still be read)."""
    path = folder / name
    if name == "cut.jsonl.gz":
        path.write_bytes(gzip.compress(os.urandom(0) + jsonl(TEXTS * 400))[:-40])
        return path, r"cut.jsonl.gz', from line \d+ on: damaged \(Compressed file ended", None
    if name == "changed.jsonl.gz":
        content = bytearray(gzip.compress(jsonl(TEXTS)))
        content[-6] ^= 255  # the checksum
        path.write_bytes(content)
        return path, r"changed.jsonl.gz', from line \d+ on: damaged \(CRC check failed", None
    if name == "cut.jsonl.zst":
        path.write_bytes(zst(jsonl(TEXTS), 1000)[:-9])
        return path, r"cut.jsonl.zst', from line 1 on: damaged \(the file ends inside a Zstandard frame", 0
    if name == "no.jsonl.gz":
        path.write_bytes(b"not compressed at all")
        return path, r"no.jsonl.gz', from line 1 on: damaged \(Not a gzipped file", 0
    if name == "no.txt.zst":
        path.write_bytes(b"not compressed at all")
        return path, r"no.txt.zst' is damaged \(", 0
    if name == "line.jsonl":
        path.write_bytes(jsonl(["one"]) + b'{"text": "two"\n\n' + jsonl(["three"]))
        return path, r"line.jsonl', line 2: not JSON \(Expecting ',' delimiter at character 15\)", 2
    if name == "list.jsonl":
        path.write_bytes(b"[1]\n" + jsonl(["two"]))
        return path, r"list.jsonl', line 1: JSON, but list and not an object with the field 'text'", 1
    if name == "deep.jsonl":
        path.write_bytes(jsonl(["one"]) + b"[" * 200_000 + b"\n" + jsonl(["three"]))
        return path, r"deep.jsonl', line 2: ", 2
    if name == "field.jsonl":
        path.write_bytes(jsonl(["one"]) + jsonl(["two"], "body"))
        return path, r"field.jsonl', line 2: no field 'text'; its fields are 'id', 'body'", 1
    if name == "number.jsonl":
        path.write_bytes(b'{"text": 3}\n' + jsonl(["two"]))
        return path, r"number.jsonl', line 1: field 'text' is int, not text", 1
    if name == "bytes.jsonl":
        path.write_bytes(b'{"text": "\xff"}\n' + jsonl(["two"]) + b'{"text": "\\ud800"}\n')
        return path, r"bytes.jsonl', line 1: 'utf-8' codec can't decode", 1
    if name == "column.parquet":
        parquet(path, TEXTS, "body")
        return path, r"column.parquet' has no column 'text'; its columns are 'id', 'body'; name one of them", 0
    if name == "null.parquet":
        parquet(path, ["one", None, "three"])
        return path, r"null.parquet', row 2: column 'text' is empty \(null\)", 2
    if name == "number.parquet":
        parquet(path, [1, 2])
        return path, r"number.parquet', row 1: column 'text' is int, not text", 0
    if name == "cut.parquet":
        parquet(path, TEXTS)
        path.write_bytes(path.read_bytes()[:-20])
        return path, r"cut.parquet', from row 1 on: damaged \(", 0
    if name == "page.parquet":
        parquet(path, TEXTS, compression="none")
        content = bytearray(path.read_bytes())
        content[content.find(TEXTS[3].encode())] ^= 1
        path.write_bytes(content)
        return path, r"page.parquet', from row \d+ on: damaged \(", None
    if name == "cut.array_record":
        array_record(path, [os.urandom(40_000).hex() for _ in range(4)])
        path.write_bytes(path.read_bytes()[:100_000])
        return path, r"cut.array_record' holds no record: it is empty, cut short", 0
    if name == "changed.array_record":
        array_record(path, ["x" * 100, "y" * 100, "z" * 100])
        content = bytearray(path.read_bytes())
        content[content.find(b"y" * 20) + 5 if b"y" * 20 in content else 70] ^= 255
        path.write_bytes(content)
        return path, r"changed.array_record', record \d: damaged \(", None
    if name == "binary.array_record":
        array_record(path, ["one", b"\xff\xfe", "three"])
        return path, r"binary.array_record', record 2: not UTF-8 at offset 0", 2
    path.write_bytes(b"")
    return path, rf"{name}' holds no document; remove this empty shard", 0


DAMAGED = [
    "cut.jsonl.gz", "changed.jsonl.gz", "cut.jsonl.zst", "no.jsonl.gz", "no.txt.zst", "line.jsonl", "list.jsonl",
    "deep.jsonl", "field.jsonl", "number.jsonl", "bytes.jsonl", "column.parquet", "null.parquet", "number.parquet",
    "cut.parquet", "page.parquet", "cut.array_record", "changed.array_record", "binary.array_record", "empty.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_named_or_counted(tmp_path, name):
    path, message, num_left = damaged(tmp_path, name)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(tmp_path) in str(caught.value)
    assert "--data.on-error skip" in str(caught.value)
    (tmp_path / "z.jsonl").write_bytes(jsonl(["a sound file after it"]))
    documents, skipped = read(tmp_path, on_error="skip")
    assert documents[-1].content == b"a sound file after it"
    assert skipped and all(str(tmp_path) in line for line in skipped)
    if num_left is not None:
        assert len(documents) - 1 == num_left


def test_files_that_are_not_text_are_named_together_or_counted(tmp_path):
    write_folder(tmp_path, {"a.txt": "good", "b.bin": b"\0", "c.bin": b"\xff"})
    with pytest.raises(ValueError, match=r"not text: '.*b.bin' \(NUL byte at offset 0\), '.*c.bin' \(not UTF-8"):
        read(tmp_path)
    documents, skipped = read(tmp_path, on_error="skip")
    assert [name for name, _ in documents] == ["a.txt"]
    assert len(skipped) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://nothing/here", r"data\.path='memory://nothing/here' does not exist; correct the address"),
        ("nosuchstore://bucket/x", r"data\.path='nosuchstore://bucket/x' (needs a package|cannot be listed)"),
        ("no/such/folder", r"data\.path='no/such/folder' does not exist"),
    ],
)
def test_an_address_that_is_not_there(path, message):
    with pytest.raises(ValueError, match=message):
        list_files(path)
