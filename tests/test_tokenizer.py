"""Tokenizers: bytes, tokenizer.json, and the one that is made here; sizes that do not match the model."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from documents import write_folder
from tiny_run import config as tiny_config

from train import cli
from train.checks import validate
from train.config import DataConfig
from train.data import batches, load_corpus
from train.text import read_standard_library
from train.tokenizer import load_tokenizer, size_problem, train_tokenizer

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "shared" / "golden" / "tokenizer"
STRANGE = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{EURO SIGN}\t\0 \N{SNOWMAN}  two  spaces\r\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A tokenizer.json of 400 tokens."""
    out = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = [document.tokens.tobytes() for document in read_standard_library()[:12]]
    assert train_tokenizer(texts, vocab_size=400, out=out) == 400
    assert [path.name for path in out.parent.iterdir()] == ["tokenizer.json"]
    return str(out)


def test_every_text_comes_back(file):
    tokenizer = load_tokenizer(file)
    assert (tokenizer.size, tokenizer.dtype) == (400, np.uint16)
    text = read_standard_library()[40].tokens.tobytes()
    for content in (text, STRANGE.encode(), b"", b"x" * 1000):
        (tokens,) = tokenizer.encode([content])
        assert tokens.dtype == np.uint16
        assert tokenizer.decode(tokens).encode() == content
    (tokens,) = tokenizer.encode([text])
    assert len(tokens) < 0.6 * len(text)


def test_the_end_token_ends_every_document(file):
    plain, ended = load_tokenizer(file), load_tokenizer(file, "<|endoftext|>")
    assert plain.fingerprint != ended.fingerprint
    for without, tokens in zip(plain.encode([b"one", b""]), ended.encode([b"one", b""]), strict=True):
        assert tokens.tolist() == [*without.tolist(), 0]


def test_making_a_tokenizer_twice_gives_the_same(file, tmp_path):
    texts = [document.tokens.tobytes() for document in read_standard_library()[:12]]
    train_tokenizer(texts, vocab_size=400, out=tmp_path / "deep" / "t.json")
    assert (tmp_path / "deep" / "t.json").read_text() == pathlib.Path(file).read_text()


def test_a_small_text_makes_a_small_tokenizer(tmp_path):
    assert 257 <= train_tokenizer([b"abc abc"], vocab_size=5000, out=tmp_path / "t.json") < 270
    with pytest.raises(ValueError, match="--vocab-size 256 must be at least 257"):
        train_tokenizer([b"abc"], vocab_size=256, out=tmp_path / "t.json")


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden data are not part of the repository")
def test_golden_cases():
    tokenizer = load_tokenizer(str(GOLDEN / "tokenizer.json"))
    assert tokenizer.size == 4096
    for line in (GOLDEN / "cases.txt").read_text().splitlines():
        case = json.loads(line)
        (tokens,) = tokenizer.encode([case["text"].encode()])
        assert tokens.tolist() == case["ids"]
        assert tokenizer.decode(tokens) == case["text"]


def test_settings_of_the_file_cut_and_pad_nothing(file, tmp_path):
    content = json.loads(pathlib.Path(file).read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(content))
    plain, strange = load_tokenizer(file), load_tokenizer(str(tmp_path / "t.json"))
    for one, other in zip(plain.encode([b"hello", b"a" * 99]), strange.encode([b"hello", b"a" * 99]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("content", "end_token", "message"),
    [
        (None, "", r"data.tokenizer='.*t.json' cannot be read \(No such file.*`python -m train tokenizer` makes one"),
        (b"{", "", r"is not a Hugging Face tokenizer.json \("),
        (b"\xff\xfe", "", r"is not a Hugging Face tokenizer.json \("),
        (b'{"model": {"type": "Nothing"}}', "", r"is not a Hugging Face tokenizer.json \("),
        ("good", "<eos>", r"data.end_token='<eos>' is not a token of '.*'; its special tokens are <|endoftext|>"),
    ],
)
def test_a_tokenizer_that_is_none(file, tmp_path, content, end_token, message):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(pathlib.Path(file).read_bytes() if content == "good" else content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(path), end_token)


def test_tokens_that_are_drawn_are_refused(file, tmp_path):
    content = json.loads(pathlib.Path(file).read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has a BPE dropout of 0.1.*; set \"dropout\": null in the file"):
        load_tokenizer(str(tmp_path / "t.json"))


@pytest.mark.parametrize("out", [".", "file/t.json"])
def test_a_file_that_cannot_be_written_is_named_before_the_text_is_read(tmp_path, out):
    (tmp_path / "file").write_text("")

    def texts():
        raise AssertionError("read")
        yield b""

    with pytest.raises(ValueError, match=r"--out '.*' cannot be written \(.*\); name another file"):
        train_tokenizer(texts(), vocab_size=300, out=tmp_path / out)


def test_bytes_have_no_end_token():
    with pytest.raises(ValueError, match="needs a token of its own, which bytes do not have"):
        load_tokenizer("bytes", "<eos>")


@pytest.mark.parametrize(
    ("size", "vocab_size", "part"),
    [
        (
            4096,
            4095,
            "must be at least 4096, because data.tokenizer='t.json' has 4,096 ids; use --model.vocab-size 4096",
        ),
        (32000, 128256, "does not match data.tokenizer='t.json', which has 32000 ids: it may be up to 10 % more"),
        (32000, 36000, "use --model.vocab-size 32000, or"),
        (400, 512, "use --model.vocab-size 400, or"),
        (500, 600, "use --model.vocab-size 512, or"),
        (4096, 4096, None),
        (151665, 151936, None),
        (128815, 129280, None),
    ],
)
def test_sizes_that_do_not_match(size, vocab_size, part):
    problem = size_problem("t.json", size, vocab_size)
    assert problem is None if part is None else part in problem


def test_a_mismatch_is_one_of_all_problems_in_the_configuration(file):
    run = tiny_config(num_steps=0)
    for vocab_size, part in ((256, "model.vocab_size=256 must be at least 400"), (512, "does not match")):
        model = dataclasses.replace(run.model, vocab_size=vocab_size)
        wrong = dataclasses.replace(run, model=model, data=dataclasses.replace(run.data, tokenizer=file))
        with pytest.raises(ValueError, match="2 problems") as caught:
            validate(wrong, 2)
        assert part in str(caught.value)
    good = dataclasses.replace(wrong, model=dataclasses.replace(run.model, vocab_size=400), num_steps=1)
    validate(good, 2)


def test_a_corpus_of_tokens(file, tmp_path):
    texts = {f"d{i}.txt": document.tokens.tobytes() for i, document in enumerate(read_standard_library()[:9])}
    write_folder(tmp_path / "text", texts)
    data = DataConfig(
        path=str(tmp_path / "text"),
        tokenizer=file,
        end_token="<|endoftext|>",
        cache=str(tmp_path / "cache"),
        seq_len=128,
        batch_size=2,
        held_out_fraction=0.2,
    )
    corpus = load_corpus(data)
    assert 1.5 < corpus.bytes_per_token < 5
    assert "tokens" in corpus.summary(128)
    tokenizer = load_tokenizer(file)
    found = sorted(
        tokenizer.decode(document.tokens[:-1]).encode() for side in (corpus.train, corpus.held_out) for document in side
    )
    assert found == sorted(texts.values())
    assert all(document.tokens[-1] == 0 for document in corpus.train)
    as_bytes = corpus.as_bytes(corpus.held_out, max_tokens=1)
    assert len(as_bytes) == 1 and as_bytes[0].tokens.dtype == np.uint8
    assert (
        max(batch["tokens"].max() for batch in batches(corpus, seq_len=128, batch_size=2, seed=0, num_epochs=1)) > 256
    )


def test_the_command_makes_a_tokenizer_from_what_is_trained_on(tmp_path, capsys):
    write_folder(tmp_path / "text", {f"f{i}.txt": f"the words of document {i}\n" * 40 for i in range(9)})
    out = tmp_path / "t.json"
    words = ["tokenizer", "--data.path", str(tmp_path / "text"), "--vocab-size", "280", "--out", str(out)]
    assert cli.main(words) == 0
    assert f"wrote {out} with 280 tokens; use --data.tokenizer {out} --model.vocab-size 280" in capsys.readouterr().out
    assert load_tokenizer(str(out)).size == 280
    tiny = str(pathlib.Path(__file__).parent / "tiny_run.py")
    assert cli.main([words[0], tiny, *words[1:], "--vocab-size", "100"]) == 2
    assert "--vocab-size 100 must be at least 257" in capsys.readouterr().err
    assert cli.main([words[0], "--data.path", "no/where", *words[3:]]) == 2
    assert "data.path='no/where' does not exist" in capsys.readouterr().err


def make_tokenizer(tmp_path, *options):
    words = ["tokenizer", "--vocab-size", "300", "--out", str(tmp_path / "t.json"), *map(str, options)]
    return cli.main(words)


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "f04.txt"], ids=["a name below the share", "one above it"])
def test_a_tokenizer_is_made_of_the_beginning_of_a_single_file(tmp_path, capsys, name):
    write_folder(tmp_path, {name: "the words of the beginning\n" * 100 + "zyxw held out zyxw\n" * 10})
    assert make_tokenizer(tmp_path, "--data.path", tmp_path / name, "--data.held-out-fraction", "0.08") == 0
    vocabulary = json.loads((tmp_path / "t.json").read_text())["model"]["vocab"]
    assert "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}beginning" in vocabulary or "beginning" in vocabulary
    assert not [token for token in vocabulary if "zy" in token or "held" in token], "the end is held out"


def test_a_tokenizer_says_what_it_was_not_made_of(tmp_path, capsys):
    write_folder(
        tmp_path, {"text/a.jsonl": '{"text": "some words\\n some words"}\n{"text"\n{"text": "words"}\n', "empty": ""}
    )
    assert make_tokenizer(tmp_path, "--data.path", tmp_path / "text", "--data.on-error", "skip") == 0
    assert "1 things that cannot be read passed over, the first: " in capsys.readouterr().out
    for options, message in (
        (["--data.path", tmp_path / "text"], "a.jsonl', line 2: not JSON"),
        (["--data.path", tmp_path / "empty"], "holds no text: 'empty' is empty"),
        (["--data.path", tmp_path / "text", "--data.held-out-fraction", "1"], "held_out_fraction=1.0 must be above 0"),
    ):
        assert make_tokenizer(tmp_path, *options) == 2
        assert message in capsys.readouterr().err
