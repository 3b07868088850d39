"""What the documents show is run: the README's snippet, the example, and the examples in docstrings."""

import doctest
import importlib
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_readme_snippet():
    """In a process of its own, as a reader would run it; it checks itself."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "assert error < 5e-6" in snippet
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "largest difference from dense attention" in done.stdout


def test_own_model_example(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the suite has made its devices already
    losses = runpy.run_path(str(ROOT / "examples" / "own_model.py"))["train"](num_steps=40, seq_len=64)
    assert losses[-1] < 0.1 * losses[0]


def test_migration_guide(monkeypatch):
    """Its blocks are one program; it checks itself."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the suite has made its devices already
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "migrating.md").read_text(), re.S)
    assert len(blocks) >= 6
    exec("\n".join(blocks), {"__name__": "migrating"})


def test_options_page_is_that_of_the_tables():
    page = runpy.run_path(str(ROOT / "scripts" / "options_page.py"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text() == page, "docs/options.md is stale: run `make docs`"


DOCUMENTED = ["attention", "balance", "compat", "costs", "dropout", "flax", "hardware", "inspection", "layouts"]
DOCUMENTED += ["links", "mesh", "options", "planner", "reference", "sharded", "softmax"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings(name: str):
    module = importlib.import_module(f"ring_jax.{name}")
    finder = doctest.DocTestFinder()
    names = vars(module) | {"jax": jax, "jnp": jnp, "np": np, "ring_jax": ring_jax}
    tests = [t for t in finder.find(module, globs=names) if t.examples]
    assert tests, f"ring_jax.{name} has no example"
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


def test_links_in_the_documents_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
        for name in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
