"""Documents, and the text that is there without being asked for: Python's own standard library.

What always holds: one file (or one topic of the language reference) is one document, its tokens are exactly the
bytes of the file, and a file is either read whole or named in an error. Nothing is decoded, normalized or cut.
"""

import dataclasses
import errno
import hashlib
import importlib
import os
import stat
import sysconfig
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
"""A token is a byte."""

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "site-packages", "test", "tests", "idle_test"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_TOPICS_MODULE = "pydoc_data.topics"
_MAX_NAMED = 5
MAKE_READABLE = "make it readable or leave it out of data.path"
"""What to do about a file that cannot be read."""


class AnyDocument(typing.Protocol):
    """One text, in memory or in a cache."""

    def __len__(self) -> int:
        """Tokens in it; reads nothing."""
        ...

    @property
    def tokens(self) -> np.ndarray:
        """All its tokens."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop, fewer at the end of the document."""
        ...

    @property
    def place(self) -> int:
        """A number below 2**64 from the name alone: what decides whether the document is held out."""
        ...

    @property
    def digest(self) -> bytes:
        """16 bytes of a hash of the name and the tokens."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """One text in memory. `name` is unique in its source; `tokens` is a read-only uint8 array."""

    name: str
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop, fewer at the end of the document."""
        return self.tokens[start:stop]

    @property
    def place(self) -> int:
        """The number that its name gives."""
        return name_place(self.name)

    @property
    def digest(self) -> bytes:
        """16 bytes of a hash of the name and the tokens."""
        return document_digest(self.name, self.tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentPart(Document):
    """The tokens of a text from `start` on, as many as there are in `tokens`."""

    whole: bytes
    """Digest of the whole text."""
    start: int

    @property
    def digest(self) -> bytes:
        """16 bytes of a hash of the whole text and the place in it."""
        return part_digest(self.whole, self.start, self.start + len(self))


def name_place(name: str) -> int:
    """The first 8 bytes of the SHA-256 hash of a document's name, as a number."""
    return int.from_bytes(hashlib.sha256(_name_bytes(name)).digest()[:8])


def document_digest(name: str, tokens: np.ndarray) -> bytes:
    """16 bytes of a hash of the name and the tokens."""
    digest = hashlib.sha256(_name_bytes(name) + f"\0{len(tokens)}\0{tokens.dtype.str}\0".encode())
    digest.update(np.ascontiguousarray(tokens))
    return digest.digest()[:16]


def part_digest(whole: bytes, start: int, stop: int) -> bytes:
    """16 bytes of a hash of tokens start to stop of a document with the digest `whole`."""
    return hashlib.sha256(whole + f"{start} {stop}".encode()).digest()[:16]


def _name_bytes(name: str) -> bytes:
    """The name as the file system writes it, also when it is not UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def encode(text: str) -> np.ndarray:
    """Tokens of a text: its UTF-8 bytes, uint8."""
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def decode(tokens: np.ndarray) -> str:
    """Text of some tokens; bytes that are not UTF-8 (a model may sample them) show as the replacement character."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def read_standard_library() -> list[Document]:
    """Sources of the Python that is running, and its language reference, in the order of their names.

    Read are all `*.py` files under the standard library's folder, and every topic of `pydoc_data.topics`. Left out:

    - test suites (`test`, `tests`, `idle_test`): many times larger than the library where they are installed, missing
      on most systems, and full of deliberately broken or binary-like text;
    - `site-packages` and `dist-packages`: not part of Python;
    - `encodings`: generated character tables, nearly equal to one another, so a held-out table tests nothing;
    - `_sysconfigdata*` and `config-*`: settings of one machine's build;
    - `pydoc_data/topics.py` as a file: its topics are read as the texts they are.

    Systems that ship Python in parts (Debian without `idlelib`, `tkinter`, `lib2to3` or `pydoc_data`) lack some of
    these: what is there is read.
    """
    root = Path(sysconfig.get_path("stdlib"))
    topics_file = _TOPICS_MODULE.replace(".", "/") + ".py"
    documents = []
    if root.is_dir():
        for name, file in walk(root, _SKIPPED_FOLDERS):
            skipped = any(part.startswith(_SKIPPED_PREFIXES) for part in name.split("/"))
            if name.endswith(".py") and name != topics_file and not skipped:
                documents.append(_read(name, file))
    if not documents:
        raise ValueError(
            f"Python's standard library has no source files in {str(root)!r} (this Python keeps it elsewhere, perhaps "
            "in an archive); give a text file or a folder of text files with --data.path"
        )
    try:
        topics = importlib.import_module(_TOPICS_MODULE).topics
    except ImportError:
        topics = {}
    documents += [Document(f"{_TOPICS_MODULE}/{topic}", encode(text)) for topic, text in sorted(topics.items())]
    reasons = [(document.name, why_not_text(document.tokens.tobytes())) for document in documents]
    if problems := [f"{name!r} ({reason})" for name, reason in reasons if reason]:
        raise ValueError(not_text(problems))
    return documents


def walk(
    root: Path,
    skipped_folders: frozenset[str],
    *,
    skip_hidden: bool = False,
    refuse: Callable[[OSError], None] | None = None,
) -> Iterator[tuple[str, Path]]:
    """(name relative to root with slashes, file) of every file below root, each once, in an order set by the names.

    The files of a folder come before its subfolders. `refuse` is told about a folder that cannot be listed; without it
    that is a ValueError.
    """

    def fail(error: OSError) -> None:
        raise ValueError(f"{unreadable(error.filename, error)}; {MAKE_READABLE}") from error

    seen = {os.path.realpath(root)}
    for folder, subfolders, names in os.walk(root, onerror=refuse or fail, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped_folders)
        if skip_hidden:
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        for kind in (names, subfolders):
            kind[:] = [name for name in sorted(kind) if _is_new(Path(folder, name), seen)]
        yield from ((Path(folder, name).relative_to(root).as_posix(), Path(folder, name)) for name in names)


def _is_new(path: Path, seen: set[str]) -> bool:
    """Whether this file or folder has not been met under another name; remembers it."""
    real = os.path.realpath(path)
    is_new = real not in seen
    seen.add(real)
    return is_new


def _read(name: str, file: Path) -> Document:
    """The whole file as one document."""
    try:
        return Document(name, np.frombuffer(read_file(file), np.uint8))
    except OSError as error:
        raise ValueError(f"{unreadable(str(file), error)}; {MAKE_READABLE}") from error


def read_file(file: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it is not one, or cannot be read.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return file.read_bytes()


def reason_of(error: BaseException) -> str:
    """The first line of what an error says."""
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).split("\n")[0][:300]


def unreadable(file: str, error: OSError, where: str = "") -> str:
    """What to say about a file that cannot be read, from some place on where that is known."""
    return f"{file!r}{where} cannot be read ({error.strerror or error})"


def not_text(problems: list[str]) -> str:
    """What to say about files that are not text, each given as its name and the reason."""
    more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
    return (
        f"not text: {', '.join(problems[:_MAX_NAMED])}{more}; training text must be UTF-8 without NUL bytes: "
        "convert these files (for example with iconv -t UTF-8) or move them out of data.path"
    )


def why_not_text(content: bytes) -> str | None:
    """None for text, else what is wrong and where."""
    nul = content.find(b"\0")
    return f"NUL byte at offset {nul}" if nul >= 0 else why_not_utf8(content)


def why_not_utf8(content: bytes) -> str | None:
    """None for UTF-8, else where it is not."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at offset {error.start}"
    return None
