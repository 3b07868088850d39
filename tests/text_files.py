"""Files of every kind that the readers know, with the same texts."""

import gzip
import json

import fsspec
import pyarrow
import pyarrow.parquet
import zstandard
from array_record.python import array_record_module

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
    if kind.startswith("parquet"):
        parquet(path, TEXTS)
        compress = {"parquet": bytes, "parquet.gz": gzip.compress, "parquet.zst": zst}[kind]
        path.write_bytes(compress(path.read_bytes()))
    elif kind == "array_record":
        array_record(path, TEXTS)
    else:
        compress = {
            "jsonl": bytes,
            "ndjson.gz": gzip.compress,
            "jsonl.zst": zst,
            "json": bytes,
            "json.gz": gzip.compress,
        }
        path.write_bytes(compress[kind](jsonl(TEXTS)))
    return path


KINDS = [
    "jsonl", "ndjson.gz", "jsonl.zst", "json", "json.gz", "parquet", "parquet.gz", "parquet.zst", "array_record"
]  # fmt: skip


def copy_to_memory(folder):
    """The address of a copy of a folder, or a file, in fsspec's store in memory."""
    where = f"memory://{folder.parent.name}/{folder.name}"
    fsspec.filesystem("memory").put(str(folder), where, recursive=True)
    return where
