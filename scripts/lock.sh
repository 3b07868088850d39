#!/bin/sh
# usage: scripts/lock.sh [options of `uv pip compile`, such as --upgrade]
# Writes requirements/dev.txt and requirements/oldest.txt: exact versions and hashes for every supported Python, no
# addresses. oldest.txt has the versions of dev.txt except where requirements/oldest.in names an older one.

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
