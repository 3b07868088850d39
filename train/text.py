"""Text from disk, as documents of bytes.

What always holds: one file (or one topic of the language reference) is one document, its tokens are exactly the
bytes of the file, and a file is either read whole or named in an error. Nothing is decoded, normalized or cut.
"""

import dataclasses
import importlib
import os
import stat
import sysconfig
from collections.abc import Iterator
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


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """One text. `name` is unique in its corpus; `tokens` is a read-only uint8 array."""

    name: str
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


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
        for name, file in _walk(root, _SKIPPED_FOLDERS):
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
    _require_text(documents)
    return documents


def read_path(path: str) -> list[Document]:
    """The text file `path`, or every file in the folder `path` and the folders below it, in the order of their names.

    Names that start with a dot and `__pycache__` folders are left out, as tools do. Links are followed, and a file or
    folder with several names is read once, under the first.

    Raises:
        ValueError: `path` does not exist, or something below it cannot be read or is not UTF-8 text.
    """
    root = Path(path).expanduser()
    try:
        is_folder = stat.S_ISDIR(os.stat(root if path.strip() else "").st_mode)
    except FileNotFoundError as error:
        raise ValueError(
            f"data.path={path!r} does not exist; give a text file or a folder of text files, or leave data.path out to "
            "train on Python's own sources"
        ) from error
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from error
    if is_folder:
        files = list(_walk(root, frozenset({"__pycache__"}), skip_hidden=True))
        if not files:
            raise ValueError(
                f"data.path={path!r} is a folder without files; put text files into it or name another folder"
            )
    else:
        files = [(root.name, root)]
    documents = [_read(name, file) for name, file in files]
    _require_text(documents, root if is_folder else root.parent)
    return documents


def _walk(root: Path, skipped_folders: frozenset[str], *, skip_hidden: bool = False) -> Iterator[tuple[str, Path]]:
    """(name relative to root with slashes, file) of every file below root, each once, in an order set by the names."""

    def refuse(error: OSError) -> None:
        raise ValueError(_unreadable(error.filename, error)) from error

    seen = {os.path.realpath(root)}
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
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
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{str(file)!r} is not a regular file; leave it out of data.path")
        return Document(name, np.frombuffer(file.read_bytes(), np.uint8))
    except OSError as error:
        raise ValueError(_unreadable(str(file), error)) from error


def _unreadable(file: str, error: OSError) -> str:
    return f"{file!r} cannot be read ({error.strerror or error}); make it readable or leave it out of data.path"


def _require_text(documents: list[Document], root: Path | None = None) -> None:
    """Raises, naming the files, unless every document is UTF-8 text without NUL bytes."""
    problems = []
    for document in documents:
        reason = _why_not_text(document.tokens.tobytes())
        if reason is not None:
            file = document.name if root is None else str(root / document.name)
            problems.append(f"{file!r} ({reason})")
    if problems:
        more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ValueError(
            f"not text: {', '.join(problems[:_MAX_NAMED])}{more}; training text must be UTF-8 without NUL bytes: "
            "convert these files (for example with iconv -t UTF-8) or move them out of data.path"
        )


def _why_not_text(content: bytes) -> str | None:
    """None for text, else what is wrong and where."""
    nul = content.find(b"\0")
    if nul >= 0:
        return f"NUL byte at offset {nul}"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at offset {error.start}"
    return None
