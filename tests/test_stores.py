"""Stores: what fsspec opens is listed whole and read exactly, or what fails is named."""

import importlib
import io
import zipfile

import fsspec
import fsspec.implementations.memory
import pytest
from documents import write_folder
from text_files import KINDS, copy_to_memory, jsonl, make, read

from train import files as files_module
from train import stores
from train.files import Damage, list_files


def test_a_stamp_of_a_web_server_is_what_it_says_of_the_content():
    class Server:
        def __init__(self, **info):
            self.info = lambda file: {"name": file, "type": "file", **info}

        def ukey(self, file):
            return "of the address alone"

    answers = [{"size": 3}, {"size": 4}, {"size": 3, "ETag": "a"}, {"size": 3, "ETag": "b"}, {"Last-Modified": "today"}]
    stamps = [stores._stamp(Server(**answer), "https://host/a.txt") for answer in answers]
    assert len(set(stamps)) == len(answers)


class LostConnectionError(Exception):
    """As stores raise it: no OSError."""


def break_reads(monkeypatch, times):
    """The first `times` reads of the store in memory fail, from the second on in the middle of a file."""
    left, whole = [times], fsspec.implementations.memory.MemoryFile.read

    def read_or_fail(self, size=-1):
        if left[0] and self.tell() < len(self.getvalue()):
            left[0] -= 1
            raise LostConnectionError("reset by peer\nand more")
        return whole(self, size)

    monkeypatch.setattr(stores, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(files_module, "CHUNK", 64)
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", read_or_fail)


@pytest.mark.parametrize("kind", ["txt", *KINDS])
def test_reads_of_a_store_are_tried_again_and_then_named(tmp_path, monkeypatch, kind):
    if kind == "txt":
        write_folder(tmp_path, {"a.txt": "some text " * 30})
    where = copy_to_memory(make(tmp_path, kind) if kind != "txt" else tmp_path / "a.txt")
    whole, _ = read(where)
    assert whole
    with monkeypatch.context() as patch:
        break_reads(patch, times=2)
        assert read(where) == (whole, [])
        break_reads(patch, times=10**9)
        message = r"/a\..*'.* cannot be read \(LostConnectionError: reset by peer\); make it readable"
        with pytest.raises(ValueError, match=message):
            read(where)
        documents, skipped = read(where, on_error="skip")
    assert documents == [] and len(skipped) == 1 and "LostConnectionError" in skipped[0]


def test_a_store_that_cannot_be_listed_is_named(monkeypatch):
    def fail(self, path, **options):
        raise LostConnectionError("no route")

    monkeypatch.setattr(stores, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "info", fail)
    with pytest.raises(ValueError, match=r"cannot be listed \(LostConnectionError: no route\); correct the address or"):
        list_files("memory://bucket/text")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://nothing/here", r"data\.path='memory://nothing/here' does not exist; correct the address"),
        ("nosuchstore://bucket/x", r"data\.path='nosuchstore://bucket/x' (needs a package|cannot be listed)"),
    ],
)
def test_an_address_that_is_not_there(path, message):
    with pytest.raises(ValueError, match=message):
        list_files(path)


class Folders(fsspec.AbstractFileSystem):
    """A store without a search of its own, as SFTP or HDFS are, with the host in its address."""

    protocol = "folders"
    cachable = False
    tree = {  # noqa: RUF012
        "/t": ["/t/b", "/t/a.txt", "/t/locked", "/t/.hidden"],
        "/t/b": ["/t/b/c.txt"],
        "/t/locked": ["/t/locked/d.txt"],
        "/t/.hidden": ["/t/.hidden/e.txt"],
    }
    locked: tuple[str, ...] = ()

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.split("://")[1].split("/", 1)[1] if "://" in path else path

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"host": path.split("://")[1].split("/")[0]}

    def __init__(self, host, **options):
        super().__init__(**options)
        self.host = host

    def ls(self, path, detail=True, **options):
        if path in self.locked:
            raise OSError(5, "Input/output error")
        if path not in self.tree:
            raise FileNotFoundError(path)
        return [self.info(entry) for entry in self.tree[path]]

    def info(self, path, **options):
        if path not in self.tree and not any(path in entries for entries in self.tree.values()):
            raise FileNotFoundError(path)
        return {"name": path, "size": 4, "type": "directory" if path in self.tree else "file"}

    def _open(self, path, mode="rb", **options):
        with fsspec.filesystem("memory").open("/text", "wb") as file:
            file.write(f"{path} of {self.host}".encode())
        return fsspec.filesystem("memory").open("/text", mode)


@pytest.fixture
def folders(monkeypatch):
    monkeypatch.setattr(stores, "_PAUSES_S", (0.0, 0.0))
    fsspec.register_implementation("folders", Folders, clobber=True)
    return Folders


def test_a_folder_of_a_store_that_cannot_be_listed_is_named_or_counted(folders, monkeypatch):
    everything = [("a.txt", b"/t/a.txt of host"), ("b/c.txt", b"/t/b/c.txt of host")]
    assert read("folders://host/t")[0] == [*everything, ("locked/d.txt", b"/t/locked/d.txt of host")]
    monkeypatch.setattr(folders, "locked", ("/t/locked", "/t/.hidden"))
    with pytest.raises(ValueError, match=r"'folders://host/t/locked' cannot be read \(OSError: Input/output error\)"):
        list_files("folders://host/t")
    damage = Damage(on_error="skip")
    assert [file.name for file in list_files("folders://host/t", damage)] == [name for name, _ in everything]
    assert damage.num_skipped == 1
    monkeypatch.setattr(folders, "locked", ("/t",))
    with pytest.raises(ValueError, match=r"data.path='folders://host/t' cannot be listed \(OSError: Input/output"):
        list_files("folders://host/t", Damage(on_error="skip"))


def test_the_host_of_an_address_is_not_lost(folders):
    """Two hosts with the same names are two texts."""
    files = [*list_files("folders://one/t/b"), *list_files("folders://two/t/b/c.txt")]
    assert [file.path for file in files] == ["folders://one/t/b/c.txt", "folders://two/t/b/c.txt"]
    assert len({file.real_path for file in files}) == 2
    contents = []
    for file in files:
        with file.open() as stream:
            contents.append(stream.read())
    assert contents == [b"/t/b/c.txt of one", b"/t/b/c.txt of two"]


def test_a_chain_of_addresses_is_read_as_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("texts/a.txt", "one")
        archive.writestr("texts/more/b.txt", "two")
    fsspec.filesystem("memory").put(str(tmp_path / "all.zip"), f"/{tmp_path.name}/all.zip")
    where = f"zip://texts::memory://{tmp_path.name}/all.zip"
    assert read(where)[0] == [("a.txt", b"one"), ("more/b.txt", b"two")]
    assert [file.path for file in list_files(where)] == [
        f"zip://texts/{name}::memory://{tmp_path.name}/all.zip" for name in ("a.txt", "more/b.txt")
    ]
    assert read(f"zip://texts/a.txt::memory://{tmp_path.name}/all.zip")[0] == [("a.txt", b"one")]
    assert read(f"simplecache::memory://{tmp_path.name}/all.zip", on_error="skip")[1][0].startswith("not text")


class Changing:
    """A store with one file of which each read but the first of a connection fails."""

    def __init__(self, versions):
        self.versions, self.opened = iter(versions), 0
        self.content = next(self.versions)

    def ukey(self, file):
        return self.content[:1].decode()

    def info(self, file):
        return {"name": file}

    def invalidate_cache(self):
        self.content = next(self.versions, self.content)

    def open(self, file, mode):
        self.opened += 1
        return Dropping(self.content)


class Dropping(io.BytesIO):
    """A connection that is lost after the first read."""

    def read(self, size=-1):
        if self.is_lost:
            raise LostConnectionError("reset by peer")
        self.is_lost = True
        return super().read(size)

    is_lost = False


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_replaced_while_it_was_read_is_not_pieced_together(monkeypatch, is_replaced):
    monkeypatch.setattr(stores, "_PAUSES_S", (0.0, 0.0))
    system = Changing([b"a" * 9, b"b" * 9] if is_replaced else [b"a" * 9])
    stored = stores.Stored(system=system, file="x", stamp=stores._stamp(system, "x"))
    with stores.Remote(stored) as raw:
        found = raw.read(4)
        if is_replaced:
            with pytest.raises(OSError, match="it was replaced while it was read"):
                raw.read(4)
            return
        found += raw.read(4) + raw.read(4)
        assert found == b"a" * 9 and system.opened == 3


class Web(fsspec.AbstractFileSystem):
    """A web server: every address is a page, and fsspec takes a page with links for a folder."""

    protocol = ("http", "https")
    cachable = False
    pages = {  # noqa: RUF012
        "https://host/t/": b"",
        "https://host/t/a.jsonl": jsonl(["<a href=b.txt>", "two"]),
        "https://host/t/b.txt": b"text",
        "https://host/t/a.jsonl?signature=a/b": jsonl(["<a href=b.txt>", "two"]),
    }

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def exists(self, path, **options):
        return path in self.pages

    def isdir(self, path):
        return b"href" in self.pages[path] or path.endswith("/")

    def ls(self, path, detail=True, **options):
        return [self.info(f"https://host/t/{name}") for name in ("a.jsonl", "b.txt")]

    def info(self, path, **options):
        return {"name": path, "size": len(self.pages[path]), "type": "file"}

    def _open(self, path, mode="rb", **options):
        return io.BytesIO(self.pages[path])


def test_files_of_a_web_server(monkeypatch):
    """A query is no part of a name, and a text with links in it is no folder."""
    monkeypatch.setattr(stores, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "https", Web)
    lines = [("a.jsonl:1", b"<a href=b.txt>"), ("a.jsonl:2", b"two")]
    assert read("https://host/t/")[0] == [*lines, ("b.txt", b"text")]
    assert read("https://host/t/a.jsonl?signature=a/b")[0] == lines
    (file,) = list_files("https://host/t/a.jsonl?signature=a/b")
    assert file.path == "https://host/t/a.jsonl"
    with pytest.raises(ValueError, match=r"nothing.txt' does not exist; correct the address"):
        read("https://host/nothing.txt")
