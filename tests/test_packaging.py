"""What a fresh clone needs before anything else: set-up, pins, the wheel, and a test suite that can fail."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import jax.numpy as jnp
import jaxtyping
import pytest

import ring_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SH = shutil.which("sh")
GOOD = 'echo "3.13 "'


def write_program(path: pathlib.Path, body: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{SH}\n{body}\n")
    path.chmod(0o755)
    return path


def run_script(name: str, *arguments: object, root: pathlib.Path = ROOT, **environment: object):
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "PYENV_ROOT")}
    env |= {key: str(value) for key, value in environment.items()}
    command = [SH, str(root / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def find_python(tmp_path: pathlib.Path, **environment: object):
    settings = {"PATH": tmp_path / "bin", "PYENV_ROOT": tmp_path / "pyenv"} | environment
    return run_script("find_python.sh", **settings)


def test_python_is_found_past_broken_and_old_ones(tmp_path):
    write_program(tmp_path / "bin/python3.13", "exit 127")
    write_program(tmp_path / "bin/python3", 'echo "3.11 "')
    good = write_program(tmp_path / "bin/python3.12", 'echo "3.12 "')
    write_program(tmp_path / "pyenv/versions/3.13.0/bin/python", GOOD)
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (0, f"{good}\n")


def test_python_is_found_under_pyenv(tmp_path):
    write_program(tmp_path / "bin/python3.13", "exit 127")
    write_program(tmp_path / "pyenv/versions/3.11.7/bin/python", 'echo "3.11 "')
    good = write_program(tmp_path / "pyenv/versions/3.13.0/bin/python", GOOD)
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (0, f"{good}\n")


def test_a_real_python_is_accepted(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    assert find_python(tmp_path).stdout == f"{tmp_path}/bin/python3\n"


def test_missing_python_names_every_candidate_and_the_fix(tmp_path):
    write_program(tmp_path / "bin/python3.13", "exit 127")
    write_program(tmp_path / "bin/python3.12", 'echo "3.12 lacks the modules: ensurepip"')
    write_program(tmp_path / "bin/python3", 'echo "3.11 "')
    write_program(tmp_path / "bin/python", 'echo "3.15 "')
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    lacking = "Python 3.12, but it lacks the modules: ensurepip (Debian, Ubuntu: apt install python3.12-venv)"
    for expected in (
        "error: no Python 3.12, 3.13 or 3.14",
        f"{tmp_path}/bin/python3.13: does not run\n",
        f"{tmp_path}/bin/python3.12: {lacking}\n",
        f"{tmp_path}/bin/python3: Python 3.11, too old\n",
        f"{tmp_path}/bin/python: Python 3.15, for which the pinned packages have no wheels\n",
        "fix: install one",
        "PYTHON=/path/to/python3.13",
    ):
        assert expected in found.stderr


def test_no_python_at_all(tmp_path):
    found = find_python(tmp_path)
    assert found.returncode == 1
    assert "nothing: there is no program named python3 or python" in found.stderr


def test_the_python_that_the_user_names_is_the_only_candidate(tmp_path):
    good = write_program(tmp_path / "elsewhere/python", GOOD)
    old = write_program(tmp_path / "bin/python3.13", 'echo "3.9 "')
    assert find_python(tmp_path, PYTHON=good).stdout == f"{good}\n"
    for wrong, reason in ((old, "Python 3.9, too old"), (tmp_path / "nowhere", "no such program")):
        found = find_python(tmp_path, PYTHON=wrong)
        assert (found.returncode, found.stdout) == (1, "")
        assert f"PYTHON={wrong} will not do" in found.stderr and f"{wrong}: {reason}" in found.stderr


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose .venv has a Python that fails to install, saying what tmp_path/error says."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "pins.txt").write_text("a==1\n")
    pip = f'*"pip install"*) cat "{tmp_path}/error" >&2; exit 1 ;;'
    write_program(tmp_path / ".venv/bin/python", f'case "$*" in {pip} *import*) {GOOD} ;; esac')
    return tmp_path


def test_setup_does_nothing_the_second_time(checkout):
    (checkout / ".venv/installed.txt").write_text("a==1\n")
    done = run_script("setup.sh", ".venv", "pins.txt", root=checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("pip_says", "expected"),
    [
        ("NewConnectionError: Temporary failure\nERROR: No matching distribution found", "could not be reached"),
        ("ERROR: No matching distribution found for a==1", "has no wheel for "),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "is not the one that was pinned"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("something else", "pip could not install pins.txt"),
    ],
)
def test_failed_installation_says_what_is_missing_and_is_tried_again(checkout, pip_says, expected):
    (checkout / "error").write_text(pip_says)
    for _ in range(2):  # nothing of a failure is taken for an installation
        failed = run_script("setup.sh", ".venv", "pins.txt", root=checkout)
        assert failed.returncode == 1
        assert pip_says in failed.stderr and "fix: " in failed.stderr
        assert re.search(expected, failed.stderr)


def test_run_directory_is_fresh_unless_the_run_is_resumed(tmp_path):
    base = tmp_path / "quickstart"

    def choice(*arguments: str) -> str:
        return run_script("run_dir.sh", base, *arguments).stdout.strip()

    assert choice() == choice("--resume") == f"--run-dir {base}"
    base.mkdir()
    os.utime(base, (1, 1))
    assert choice("--num-steps", "3") == f"--run-dir {base}-2"
    (tmp_path / "quickstart-2").mkdir()
    assert choice() == f"--run-dir {base}-3"
    assert choice("--resume") == f"--run-dir {base}-2"
    assert choice("--resume", "--run-dir", "mine") == choice("--run-dir=mine") == ""


@pytest.fixture(params=["dev", "oldest", "tpu", "gpu"])
def pins(request):
    return (ROOT / f"requirements/{request.param}.txt").read_text()


def versions(pins: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", pins, re.MULTILINE))


def test_pins_have_hashes_and_no_addresses(pins):
    entries = [entry for entry in re.split(r"\n(?=[a-z])", pins) if "==" in entry]
    assert len(entries) > 50
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    assert not re.search(r"://|--(extra-)?index|--find-links|(?<![\w.])/\w", pins)


def test_pins_cover_what_the_project_asks_for(pins):
    wanted = [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["train"],
        *PROJECT["optional-dependencies"]["dev"],
    ]
    for requirement in wanted:
        name, minimum = requirement.lower().split(">=")
        found = versions(pins)[name]
        assert tuple(map(int, found.split("."))) >= tuple(map(int, minimum.split("."))), (requirement, found)


def test_oldest_pins_differ_in_jax_only():
    newest, oldest = (versions((ROOT / f"requirements/{name}.txt").read_text()) for name in ("dev", "oldest"))
    assert oldest["jax"] == "0.11.2" and oldest["flax"] == "0.12.12"
    assert {name for name in newest if newest[name] != oldest[name]} == {"jax", "jaxlib"}


@pytest.mark.parametrize(("name", "compiler"), [("tpu", "libtpu"), ("gpu", "jax-cuda12-plugin")])
def test_accelerator_pins_are_the_same_and_more(name, compiler):
    newest, more = (versions((ROOT / f"requirements/{x}.txt").read_text()) for x in ("dev", name))
    assert newest.items() <= more.items() and compiler in more.keys() - newest.keys()


def test_wheel_holds_the_library_alone(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"ring_jax", f"ring_jax-{PROJECT['version']}.dist-info"}
    assert "ring_jax/__init__.py" in names and "ring_jax/py.typed" in names
    metadata = zipfile.ZipFile(wheel).read(f"ring_jax-{PROJECT['version']}.dist-info/METADATA").decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [re.split("[ >=]+", line)[1] for line in needed] == ["jax", "jaxtyping"]
    assert "Requires-Python: >=3.12" in metadata


def test_library_needs_jax_and_jaxtyping_only():
    absent = ("beartype", "chex", "flax", "grain", "matplotlib", "optax", "orbax", "rich", "tensorboardX", "tyro")
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import ring_jax"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_imports_go_one_way():
    command = [
        sys.executable,
        "-c",
        "import sys, importlinter.cli as c; sys.exit(c.lint_imports_command())",
        "--no-cache",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_shapes_are_checked_at_run_time():
    x = jnp.ones((8, 2, 4))
    with pytest.raises(jaxtyping.TypeCheckError, match="query"):
        ring_jax.dot_product_attention(x, x, x)


def test_a_test_that_hangs_fails_and_shows_where(tmp_path):
    (tmp_path / "test_hang.py").write_text(
        "import time, pytest\n@pytest.mark.timeout(2)\ndef test_hang():\n    time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:xdist", "-p", "conftest"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*command, "test_hang.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stdout
    assert "Timeout (0:00:02)!" in done.stderr and "test_hang.py" in done.stderr
