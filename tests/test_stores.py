"""Stores: what fsspec opens is listed whole and read exactly, or what fails is named."""

import importlib
import io
import os
import shutil
import zipfile

import fsspec
import fsspec.implementations.dirfs
import fsspec.implementations.memory
import fsspec.implementations.tar
import fsspec.implementations.zip
import pytest
from documents import write_folder
from text_files import KINDS, TEXTS, copy_to_memory, jsonl, make, read

from train import files as files_module
from train import stores
from train.files import Damage, list_files


def test_a_stamp_of_a_web_server_is_what_it_says_of_the_content():
    class Server:
        def ukey(self, file):
            return "of the address alone"

    answers = [{"size": 3}, {"size": 4}, {"size": 3, "ETag": "a"}, {"size": 3, "ETag": "b"}, {"Last-Modified": "today"}]
    stamps = [stores._stamp(Server(), "https://host/a.txt", answer) for answer in answers]
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
        "/t": ["/t/b", "/t/a.txt", "/t/locked", "/t/.hidden", "/t/b"],
        "/t/b": ["/t/b/c.txt"],
        "/t/locked": ["/t/locked/d.txt"],
        "/t/.hidden": ["/t/.hidden/e.txt"],
    }
    locked: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

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
        kinds = {True: "directory", False: "file"}
        return [
            {"name": entry, "size": 4, "type": "link" if entry in self.links else kinds[entry in self.tree]}
            for entry in self.tree[path]
        ]

    def info(self, path, **options):
        if path in self.broken:
            raise FileNotFoundError(2, "No such file or directory")
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


def test_links_that_lead_nowhere_or_to_a_folder_are_named_or_counted(folders, monkeypatch):
    monkeypatch.setattr(folders, "links", ("/t/a.txt", "/t/b"))
    monkeypatch.setattr(folders, "broken", ("/t/a.txt",))
    for name, reason in (("a.txt", "No such file or directory"), ("b", "a link to a folder, which is not followed in")):
        damage = Damage(on_error="skip")
        assert [file.name for file in list_files("folders://host/t", damage)] == ["locked/d.txt"]
        assert any(f"'folders://host/t/{name}' cannot be read ({reason}" in line for line in damage.skipped)
        assert damage.num_skipped == 2


def test_a_folder_of_another_store_is_no_search_of_its_own(folders, monkeypatch):
    monkeypatch.setattr(folders, "locked", ("/t/locked",))
    system = fsspec.implementations.dirfs.DirFileSystem("/t", fs=folders("host"))
    assert not stores._lists_at_once(system)
    files, refused = stores._files_below(system, "")
    assert sorted(files) == ["a.txt", "b/c.txt"] and [folder for folder, _ in refused] == ["locked"]


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
    fsspec.filesystem("memory").put(str(make(tmp_path, "parquet")), f"/{tmp_path.name}/a.parquet")
    assert len(read(f"simplecache::memory://{tmp_path.name}/a.parquet")[0]) == len(TEXTS)
    assert [file.path for file in list_files(f"zip::file://{tmp_path}/all.zip")] == [
        f"zip://texts/{name}::file://{tmp_path}/all.zip" for name in ("a.txt", "more/b.txt")
    ]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_stamp_inside_an_archive_is_that_of_the_content(tmp_path, kind):
    """Not that of the process which reads it, nor of the archive's address."""
    stamps = []
    for text in ("one", "two", "two"):
        write_folder(tmp_path / "t", {"a.txt": text})
        os.utime(tmp_path / "t" / "a.txt", (1, 10**9 + 60 * ord(text[1])))
        shutil.make_archive(str(tmp_path / "all"), kind, tmp_path / "t")
        fsspec.implementations.zip.ZipFileSystem.clear_instance_cache()
        fsspec.implementations.tar.TarFileSystem.clear_instance_cache()
        (file,) = list_files(f"{kind}::file://{tmp_path}/all.{kind}")
        assert file.name == "a.txt", "also where the archive calls it ./a.txt"
        stamps.append(file.stamp)
    assert stamps[0] != stamps[1] == stamps[2]


class Changing:
    """A store with one file of which each read but the first of a connection fails."""

    def __init__(self, versions):
        self.versions, self.opened = iter(versions), 0
        self.content = next(self.versions)

    def info(self, file):
        """As S3 does: of one file more is told than in the listing that was forgotten."""
        more = {"VersionId": "1"} if self.opened else {"Key": file}
        return {"name": file, "size": 9, "ETag": self.content[:1].decode(), **more}

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
    stored = stores.Stored(system=system, file="x", stamp=stores._stamp(system, "x", system.info("x")))
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
        "https://host/t": b"the same",
        "https://host/t/a.jsonl": jsonl(["<a href=b.txt>", "two"]),
        "https://host/t/b.txt": b"text",
        "https://host/t/a%20page.txt": b"page",
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
        """With what servers put into their lists: other orders of the list, and a file twice."""
        names = ("?C=N;O=D", "s/?C=N;O=D", "a.jsonl", "b.txt", "b.txt#top", "a%20page.txt")
        return [{"name": f"https://host/t/{name}", "size": 1, "type": "file"} for name in names]

    def info(self, path, **options):
        return {"name": path, "size": len(self.pages[path]), "type": "file"}

    def _open(self, path, mode="rb", **options):
        return io.BytesIO(self.pages[path])


def test_files_of_a_web_server(monkeypatch):
    """A query is no part of a name, and a text with links in it is no folder."""
    monkeypatch.setattr(stores, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "https", Web)
    lines = [("a.jsonl:1", b"<a href=b.txt>"), ("a.jsonl:2", b"two")]
    assert read("https://host/t/")[0] == [("a page.txt", b"page"), *lines, ("b.txt", b"text")]
    cached = list_files("simplecache::https://host/t/")
    assert [file.name for file in cached] == ["a page.txt", "a.jsonl", "b.txt"]
    assert read("https://host/t/a.jsonl?signature=a/b")[0] == lines
    (file,) = list_files("https://host/t/a.jsonl?signature=a/b")
    assert (file.path, file.real_path) == ("https://host/t/a.jsonl", "https://host/t/a.jsonl?signature=a/b")
    with pytest.raises(ValueError, match=r"nothing.txt' does not exist; correct the address"):
        read("https://host/nothing.txt")
