"""Readers: every kind of file gives the same documents, and what is damaged is named by file and place."""

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from documents import write_folder
from text_files import KINDS, TEXTS, array_record, copy_to_memory, jsonl, make, parquet, read, zst

from train import files as files_module
from train.readers import Damage, list_files, read_documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remote", [False, True], ids=["path", "fsspec"])
def test_every_kind_gives_the_same_documents(tmp_path, kind, remote):
    path = make(tmp_path, kind)
    documents, skipped = read(copy_to_memory(path) if remote else path)
    assert [(name, content.decode()) for name, content in documents] == [
        (f"a.{kind}:{number}", text) for number, text in enumerate(TEXTS, 1)
    ]
    assert skipped == []


def test_a_folder_is_read_by_kind_and_in_the_order_of_its_names(tmp_path):
    """The same order on a disk and in a store, for which the names of files are one list."""
    folder = tmp_path / "folder"
    files = {"c.txt": "third", "b/x.jsonl": jsonl(["second"]), "b/y.txt.gz": gzip.compress(b"zipped"), "b.txt": "b"}
    write_folder(
        folder, {**files, "b/a/z.txt": "deep", "b-a.txt": "sorts before b/", "b/.hidden": "x", "B/z": "capital"}
    )
    parquet(folder / "a.parquet", ["fourth"])
    local, _ = read(folder)
    assert [name for name, _ in local] == [
        "a.parquet:1", "b-a.txt", "b.txt", "c.txt", "B/z", "b/x.jsonl:1", "b/y.txt.gz", "b/a/z.txt"
    ]  # fmt: skip
    assert dict(local)["b/y.txt.gz"] == b"zipped"
    for where in (f"file://{folder}", f"local://{folder}/", copy_to_memory(folder)):
        assert read(where)[0] == local


def test_json_files_are_lines_where_their_lines_are_objects(tmp_path):
    one = json.dumps({"text": "an object in one line"})
    texts = {"one.json": one, "two.json": f"\n{one}\n \n{one}", "tall.json": json.dumps({"a": [1]}, indent=1)}
    texts |= {"list.json": f"[{one},\n{one}]", "no.json": "not { json", "empty.json": "", "other.json": '{"a": 1}'}
    write_folder(tmp_path, texts)
    documents, _ = read(tmp_path)
    found = dict(documents)
    assert {name for name in found if name in texts} == texts.keys() - {"one.json", "two.json"}
    assert [found[name] for name in ("one.json:1", "two.json:2", "two.json:4")] == [b"an object in one line"] * 3
    with pytest.raises(ValueError, match=r"two.json', line 2: no field 'body'; its fields are 'text'"):
        read(tmp_path / "two.json", "body")


@pytest.mark.parametrize("lines", ["{bad\nGOOD\nGOOD", "GOOD\n{bad\nGOOD", "GOOD\n[1]\nGOOD"])
def test_one_damaged_line_at_the_beginning_makes_no_document_of_a_json_file(tmp_path, lines):
    write_folder(tmp_path, {"a.json": lines.replace("GOOD", '{"text": "good"}')})
    with pytest.raises(ValueError, match=r"a.json', line \d: "):
        read(tmp_path)
    documents, skipped = read(tmp_path, on_error="skip")
    assert [content for _, content in documents] == [b"good"] * 2 and len(skipped) == 1


def test_a_first_line_beyond_bounds_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_LONGEST_LINE", 20)
    write_folder(tmp_path, {"a.json": json.dumps({"text": "longer than twenty characters"}) + "\n"})
    assert read(tmp_path)[0] == [("a.json:1", b"longer than twenty characters")]


def test_zstandard_files_of_any_window(tmp_path):
    """As `zstd --long=30` writes them; the library's own limit is 2^27."""
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=False, compression_level=1, hash_log=6)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(jsonl(TEXTS)) + compressor.flush())
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "a.jsonl.zst").read_bytes())
    documents, _ = read(tmp_path / "a.jsonl.zst")
    assert [content.decode() for _, content in documents] == TEXTS


def test_a_stamp_changes_with_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    for where in (str(path), f"file://{path}"):
        (before,) = list_files(where)
        os.utime(path, (1, path.stat().st_mtime + 7))
        (after,) = list_files(where)
        assert before.stamp != after.stamp


def test_what_a_disk_does_not_give_is_passed_over_and_counted(tmp_path, monkeypatch):
    path = tmp_path / "text"
    write_folder(path, {"a.txt": "good", "b.txt": "bad", "c.jsonl": jsonl(["bad"]), "locked/d.txt": "unseen"})
    array_record(path / "e.array_record", ["bad"])
    (path / "gone.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(path / "pipe")

    def refuse(real, *names):
        def opened(file, *arguments, **options):
            if os.fspath(file).endswith(names):
                raise OSError(5, "Input/output error", str(file))
            return real(file, *arguments, **options)

        return opened

    monkeypatch.setattr(os, "scandir", refuse(os.scandir, "locked"))
    monkeypatch.setattr("io.open", refuse(open, "b.txt", "c.jsonl"))
    monkeypatch.setattr("builtins.open", refuse(open, "e.array_record"))
    damage = Damage(on_error="skip")
    found = list_files(str(path), damage)
    assert list(read_documents(found, field="text", damage=damage)) == [("a.txt", b"good")]
    assert sorted(line.removeprefix(f"'{path}/") for line in damage.skipped) == [
        "b.txt' cannot be read (Input/output error)",
        "c.jsonl', from line 1 on, cannot be read (Input/output error)",
        "e.array_record' cannot be read (Input/output error)",
        "gone.txt' cannot be read (No such file or directory)",
        "locked' cannot be read (Input/output error)",
        "pipe' is not a regular file",
    ]
    for name in ("locked", "gone.txt", "pipe"):
        with pytest.raises(ValueError, match=r"count and pass over what is damaged with --data.on-error skip"):
            list_files(str(path))
        os.rename(path / name, tmp_path / name)
    for name in ("b.txt", "c.jsonl", "e.array_record"):
        with pytest.raises(ValueError, match=rf"{name}'.* cannot be read \(Input/output error\); make it readable"):
            read(path / name)


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
    if name in ("empty.txt.gz", "empty.jsonl.zst"):
        path.write_bytes(b"")
        return path, rf"{name}'.* damaged \(a compressed file of no bytes", 0
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
    return damaged_table(path, name)


def damaged_table(path, name):
    """The same for columns and records."""
    if name == "column.parquet":
        parquet(path, TEXTS, "body")
        return path, r"column.parquet' has no column 'text'; its columns are 'id', 'body'; name one of them", 0
    if name == "null.parquet":
        parquet(path, ["one", None, "three"])
        return path, r"null.parquet', row 2: column 'text' is empty \(null\)", 2
    if name == "number.parquet":
        parquet(path, [1, 2])
        return path, r"number.parquet', row 1: column 'text' is int64, not text", 0
    if name == "bytes.parquet":
        content = pyarrow.array([b"one", b"\xff", b"three", None]).cast(pyarrow.string(), safe=False)
        pyarrow.parquet.write_table(pyarrow.table({"text": content}), path)
        return path, r"bytes.parquet', row 2: column 'text' is not UTF-8 at offset 0", 2
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
    "bytes.parquet", "empty.txt.gz", "empty.jsonl.zst",
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


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_strings_of_every_kind_of_a_parquet_column(tmp_path, kind):
    texts = pyarrow.array([*TEXTS, None])
    if kind == "dictionary":
        texts = texts.dictionary_encode()
    else:
        texts = texts.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    documents, skipped = read(tmp_path, on_error="skip")
    assert [content.decode() for _, content in documents] == TEXTS
    assert len(skipped) == 1 and "row 5: column 'text' is empty (null)" in skipped[0]


def test_memory_that_is_full_is_no_damage(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet", TEXTS)

    def fail(self, *arguments, **options):
        raise pyarrow.ArrowMemoryError("malloc of size 9 failed")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", fail)
    with pytest.raises(ValueError, match=r"a.parquet', from row 1 on, does not fit into memory \(malloc of size 9"):
        read(tmp_path, on_error="skip")


def test_lines_of_what_was_passed_over_are_bounded_and_counted():
    damage = Damage(on_error="skip")
    for number in range(2500):
        damage.found(f"line {number}")
    assert (damage.num_skipped, len(damage.skipped), damage.skipped[-1]) == (2500, 1000, "line 999")


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
        ("no/such/folder", r"data\.path='no/such/folder' does not exist"),
    ],
)
def test_an_address_that_is_not_there(path, message):
    with pytest.raises(ValueError, match=message):
        list_files(path)
