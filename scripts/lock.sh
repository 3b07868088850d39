#!/bin/sh
# usage: scripts/lock.sh [options of `uv pip compile`, such as --upgrade]
# Writes requirements/*.txt: exact versions and hashes for every supported Python, no addresses. oldest.txt has the
# versions of dev.txt except where requirements/oldest.in names an older one; tpu.txt and gpu.txt add to dev.txt what
# compiles for a TPU and for an NVIDIA GPU.

set -eu
cd "$(dirname "$0")/.."
UV_CACHE_DIR=${UV_CACHE_DIR:-$PWD/.cache/uv}
export UV_CACHE_DIR

pin() {
    .venv/bin/python -m uv --quiet pip compile pyproject.toml --extra train --extra dev --universal --python-version 3.12 \
        --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" "$@" >/dev/null
}

pin --output-file requirements/dev.txt "$@"
cp requirements/dev.txt requirements/oldest.txt
pin --output-file requirements/oldest.txt --constraint requirements/oldest.in
cp requirements/dev.txt requirements/tpu.txt
pin --output-file requirements/tpu.txt --extra tpu
cp requirements/dev.txt requirements/gpu.txt
pin --output-file requirements/gpu.txt --extra cuda12
