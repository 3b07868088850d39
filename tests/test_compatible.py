"""What a run may continue: the same model on the same text, wherever that lies; and what is said of everything else."""

import dataclasses
import shutil

import pytest
from tiny_run import config, write_text

from train.checkpoint import CheckpointError, Meta
from train.compatible import check_config, check_progress, check_text
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, SourceConfig, to_json
from train.data import load_corpus
from train.tokenizer import load_tokenizer, train_tokenizer


def meta(run, **values):
    known = {"step": 4, "data_state": {}, "config": to_json(run), "text_fingerprint": "", "tokenizer": ""}
    return Meta(**{**known, **values})


def test_a_checkpoint_of_another_model_or_text_is_refused_with_the_fields():
    other = config(
        model=dataclasses.replace(config().model, embed_dim=32),
        data=DataConfig(seq_len=128, batch_size=2),
        optimizer=OptimizerConfig(name="sgd"),
        seed=5,
    )
    with pytest.raises(CheckpointError, match="step 4 belongs to another run") as caught:
        check_config(to_json(config()), other, "the checkpoint of step 4")
    message = str(caught.value)
    for line in (
        "model.embed_dim: 16 in the checkpoint, 32 in this run",
        "data.seq_len: 64 in the checkpoint, 128 in this run",
        "optimizer.name: adamw in the checkpoint, sgd in this run",
        "seed: 0 in the checkpoint, 5 in this run",
        "another --run-dir",
    ):
        assert line in message


def test_a_field_that_an_older_version_did_not_have_counts_as_its_default():
    older = to_json(config())
    del older["model"]["rope_theta"], older["accumulate"], older["watch"]
    assert check_config(older, config(), "it") == []
    changed = config(model=dataclasses.replace(config().model, rope_theta=9.0), accumulate=2)
    with pytest.raises(CheckpointError, match=r"model\.rope_theta: 10000\.0 in the checkpoint, 9\.0 in this run"):
        check_config(older, changed, "it")
    assert check_config(older, config(accumulate=2), "it") == ["accumulate: 1 in the checkpoint, 2 in this run"]


def test_what_may_change_is_reported():
    other = config(
        model=dataclasses.replace(config().model, remat="none"),
        mesh=MeshConfig(data=2),
        num_steps=9,
        checkpoint=CheckpointConfig(every=3),
        run_dir="elsewhere",
        resume=True,
    )
    lines = check_config(to_json(config()), other, "the checkpoint of step 4")
    names = [line.split(":")[0] for line in lines]
    assert names == ["checkpoint.every", "mesh.data", "mesh.sequence", "model.remat", "num_steps"]


def sources(*places, weights=(1.0, 3.0)):
    found = tuple(SourceConfig(path=place, weight=weight) for place, weight in zip(places, weights, strict=True))
    return config(data=DataConfig(sources=found, seq_len=64, batch_size=2))


def test_text_and_tokenizer_may_move(tmp_path):
    text = write_text(tmp_path / "text")
    shutil.copytree(text, tmp_path / "moved")
    before, after = (
        config(data=DataConfig(path=str(tmp_path / name), seq_len=64, batch_size=2)) for name in ("text", "moved")
    )
    lines = check_config(to_json(before), after, "it")
    assert [line.split(":")[0] for line in lines] == ["data.path"]
    saved = meta(before, text_fingerprint=load_corpus(before.data).fingerprint)
    check_text(saved, after, load_corpus(after.data).fingerprint)
    with (tmp_path / "moved" / "document_3.txt").open("a") as file:
        file.write(" one more word")
    with pytest.raises(
        CheckpointError, match=r"text changed since step 4 .*; data\.path: .*text in the checkpoint, .*moved"
    ):
        check_text(saved, after, load_corpus(after.data).fingerprint)

    lines = check_config(to_json(sources("a", "b")), sources("a", "c"), "it")
    assert lines == ["data.sources.1.path: b in the checkpoint, c in this run"]
    for other in (sources("a", "b", weights=(1.0, 2.0)), sources("a", weights=(1.0,))):
        with pytest.raises(CheckpointError, match=r"it belongs to another run.*\n  - data\.sources\.1"):
            check_config(to_json(sources("a", "b")), other, "it")


def test_another_tokenizer_is_named_before_the_text_is_read(tmp_path):
    words = [b"ring attention keeps queries at home " * 40]
    for name, size in (("a.json", 260), ("b.json", 265)):
        train_tokenizer(words, vocab_size=size, out=tmp_path / name)
    a, b = (config(data=DataConfig(tokenizer=str(tmp_path / name), seq_len=64)) for name in ("a.json", "b.json"))
    saved = meta(a, tokenizer=load_tokenizer(a.data.tokenizer).fingerprint)
    check_progress(saved, a)
    shutil.copy(tmp_path / "a.json", tmp_path / "moved.json")
    check_progress(saved, config(data=DataConfig(tokenizer=str(tmp_path / "moved.json"), seq_len=64)))
    with pytest.raises(
        CheckpointError, match=r"b\.json' makes other tokens than .* step 4, which was '.*a\.json' then"
    ):
        check_progress(saved, b)
    check_progress(meta(a), b)  # saved before the tokenizer was: the text's fingerprint tells


def test_a_run_that_ends_before_its_checkpoint_is_refused():
    check_progress(meta(config()), config(num_steps=4))
    with pytest.raises(CheckpointError, match=r"num_steps=3 must be at least 4.*--num-steps 4 or more"):
        check_progress(meta(config()), config(num_steps=3))
