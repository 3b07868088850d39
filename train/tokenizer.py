"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`, and the command that makes one.

What always holds: token ids are below `size`, and the same text has the same tokens on every machine. A file is read
as JSON and never executed; text is cut, padded or marked by nothing that is not in the configuration.
"""

import contextlib
import dataclasses
import errno
import hashlib
import pathlib
import typing
from collections.abc import Generator, Iterable, Sequence

import numpy as np

from train import text

if typing.TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
_SMALLEST = 257
_MAX_UNUSED = 0.1


class Tokenizer(typing.Protocol):
    """Text to tokens and back."""

    @property
    def size(self) -> int:
        """Ids are 0 to size - 1."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two tokenizers make the same tokens."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """An unsigned type that holds every id."""
        ...

    def encode(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each UTF-8 text."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Text of some tokens."""
        ...


class ByteTokenizer:
    """A token is a byte."""

    size = text.VOCAB_SIZE
    fingerprint = BYTES
    dtype = np.dtype(np.uint8)

    def encode(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each UTF-8 text."""
        return [np.frombuffer(content, np.uint8) for content in contents]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of some tokens; bytes that are not UTF-8 show as the replacement character."""
        return text.decode(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`, with `end_token` (where one is named) at the end of each document.

    Names of special tokens in the text become these tokens, as everywhere with Hugging Face; what the file's
    post-processor would add (`<bos>`, say) is not added.
    """

    size: int
    fingerprint: str
    dtype: np.dtype
    model: "tokenizers.Tokenizer"
    end: np.ndarray
    """Nothing, or the id of the end token."""

    def encode(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each UTF-8 text; several threads share the work."""
        texts = [content.decode("utf-8") for content in contents]
        encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.concatenate([np.array(encoding.ids, self.dtype), self.end]) for encoding in encodings]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of some tokens; special tokens show by name."""
        return self.model.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)


def load_tokenizer(name: str, end_token: str = "") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
        name: "bytes", or the path of a `tokenizer.json`.
        end_token: Name of the token that ends every document; empty: none.

    Raises:
        ValueError: the file is missing, damaged, or does not have the end token.
    """
    if name == BYTES:
        if end_token:
            raise ValueError(
                f"data.end_token={end_token!r} needs a token of its own, which bytes do not have; leave it out, or "
                "name a tokenizer.json with --data.tokenizer"
            )
        return ByteTokenizer()
    import tokenizers

    file = pathlib.Path(name).expanduser()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"data.tokenizer={name!r} cannot be read ({error.strerror}); it must be {BYTES!r} or the path of a Hugging "
            "Face tokenizer.json (`python -m train tokenizer` makes one)"
        ) from None
    try:
        model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"data.tokenizer={name!r} is not a Hugging Face tokenizer.json ({str(error)[:200]}); fetch it again, or "
            "make one with `python -m train tokenizer`"
        ) from None
    if dropout := getattr(model.model, "dropout", None):
        raise ValueError(
            f"data.tokenizer={name!r} has a BPE dropout of {dropout}, which makes other tokens of the same text each "
            'time, so that no run could be resumed; set "dropout": null in the file'
        )
    model.no_truncation()
    model.no_padding()
    end = model.token_to_id(end_token) if end_token else None
    if end_token and end is None:
        known = sorted(token.content for token in model.get_added_tokens_decoder().values())
        raise ValueError(
            f"data.end_token={end_token!r} is not a token of {name!r}; its special tokens are "
            f"{', '.join(known[:12]) or 'none'}"
        )
    size = max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    return HuggingFaceTokenizer(
        size=size,
        fingerprint=hashlib.sha256(content + b"\0" + end_token.encode()).hexdigest(),
        dtype=dtype,
        model=model,
        end=np.array([] if end is None else [end], dtype),
    )


def size_problem(name: str, size: int, vocab_size: int) -> str | None:
    """Why a model of `vocab_size` cannot be trained with a tokenizer of `size` ids; None when it can.

    More rows than ids are usual (a multiple of 128 is faster), but one in ten unused is another model's tokenizer.
    """
    if vocab_size < size:
        because = "a token is a byte" if name == BYTES else f"data.tokenizer={name!r} has {size:,} ids"
        return (
            f"model.vocab_size={vocab_size} must be at least {size}, because {because}; use --model.vocab-size {size}"
        )
    most = int(size * (1 + _MAX_UNUSED))
    if name != BYTES and vocab_size > most:
        rounded = -(-size // 128) * 128
        return (
            f"model.vocab_size={vocab_size} does not match data.tokenizer={name!r}, which has {size} ids: it may be up "
            f"to 10 % more; use --model.vocab-size {rounded if rounded <= most else size}, or name the model's own "
            "tokenizer"
        )
    return None


def train_tokenizer(contents: Iterable[bytes], *, vocab_size: int, out: pathlib.Path) -> int:
    """Write a byte-level BPE tokenizer of some texts, as `tokenizer.json`.

    Every byte is a token, so every text can be written in it and comes back exactly; `<|endoftext|>` is its one
    special token (`--data.end-token`).

    Args:
        contents: UTF-8 texts.
        vocab_size: Ids to make.
        out: The file, replaced at once when all is done.

    Returns:
        Ids made: fewer than asked when the text has too few pairs that occur twice.

    Raises:
        ValueError: `vocab_size` is too small, or the file cannot be written.
    """
    import tokenizers

    if vocab_size < _SMALLEST:
        raise ValueError(
            f"--vocab-size {vocab_size} must be at least {_SMALLEST}: every byte and {END_OF_TEXT}; 32768 is usual"
        )
    partial = out.with_name(f"{out.name}.part")
    with _writing(out):
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("")  # before the work, which may take hours
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((content.decode("utf-8") for content in contents), trainer)
    with _writing(out):
        partial.write_text(model.to_str(pretty=True), encoding="utf-8")
        partial.replace(out)
    return model.get_vocab_size()


@contextlib.contextmanager
def _writing(out: pathlib.Path) -> Generator[None]:
    """Raises a ValueError that names `out` for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"--out {str(out)!r} cannot be written ({error.strerror}); name another file") from None
