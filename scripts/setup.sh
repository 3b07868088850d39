#!/bin/sh
# usage: scripts/setup.sh VENV REQUIREMENTS
# Makes the virtual environment VENV and installs the pinned packages of REQUIREMENTS into it, each checked against its
# hash. VENV/installed.txt is a copy of what was installed last: while it equals REQUIREMENTS there is nothing to do and
# no network is needed. Nothing is written outside the checkout.

set -eu
cd "$(dirname "$0")/.."
venv=$1
requirements=$2
stamp=$venv/installed.txt
log=$venv/install.log
case $requirements in
*/tpu.txt) download="620 MB" disk="1.8 GB" ;;
*/gpu.txt) download="3.3 GB" disk="6.1 GB" ;;
*) download="320 MB" disk="1.2 GB" ;;
esac

version_of() {
    "$1" -c 'import sys; print(sys.version)'
}

# Says what the errors of pip in $log mean and what to do.
explain() {
    if grep -q -i -E 'NewConnection|NameResolution|ConnectTimeout|Read timed out|Network is unreachable|SSLError' "$log"; then
        echo "error: the package registry could not be reached, and the first set-up needs it (about $download)."
        echo "  fix: connect to the network; behind a proxy or a mirror set HTTPS_PROXY, PIP_INDEX_URL or PIP_CERT; then run make again"
    elif grep -q 'No matching distribution\|not a supported wheel' "$log"; then
        echo "error: a pinned package has no wheel for $(uname -sm) with $(version_of "$venv/bin/python")."
        echo "  fix: use Linux (x86-64 or ARM64, glibc 2.28 or later) or macOS (ARM64), with Python 3.12 to 3.14"
    elif grep -q 'DO NOT MATCH THE HASHES' "$log"; then
        echo "error: a downloaded package is not the one that was pinned (see above); a mirror or a proxy may have changed it."
        echo "  fix: use another index (PIP_INDEX_URL); do not install it without its hash"
    elif grep -q 'No space left' "$log"; then
        echo "error: the disk is full; $venv needs about $disk."
        echo "  fix: make room, then run make again"
    else
        echo "error: pip could not install $requirements (see above)."
        echo "  fix: mend what it says, then run make again; rm -r $venv starts afresh"
    fi
}

python=""
if [ -n "${PYTHON:-}" ]; then
    python=$(sh scripts/find_python.sh)
    if [ -x "$venv/bin/python" ] && [ "$(version_of "$python")" != "$(version_of "$venv/bin/python" 2>/dev/null)" ]; then
        echo "$venv was made by another Python than PYTHON=$PYTHON; making it anew"
        rm -rf "$venv"
    fi
fi
if cmp -s "$requirements" "$stamp" && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

rm -f "$stamp"
if ! PYTHON="$venv/bin/python" sh scripts/find_python.sh >/dev/null 2>&1 || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    [ -n "$python" ] || python=$(sh scripts/find_python.sh)
    echo "Making $venv with $python"
    if ! "$python" -m venv "$venv"; then
        echo "error: $python could not make a virtual environment (see above)." >&2
        echo "  fix: mend what it says, or name another Python: make PYTHON=/path/to/python3.13" >&2
        exit 1
    fi
fi

count=$(grep -c '==' "$requirements")
echo "Installing about $count pinned packages into $venv ($download to download, $disk on disk; a minute or two)"
PIP_CACHE_DIR=${PIP_CACHE_DIR:-$PWD/.cache/pip}
export PIP_CACHE_DIR
failed=$venv/install.failed
rm -f "$failed"
{
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --require-hashes --no-deps --only-binary :all: \
        --requirement "$requirements" 2>"$log" || echo failed >"$failed"
} | while read -r verb package _; do
    case $verb in
    Collecting) echo "  $package" ;;
    Installing) echo "  unpacking" ;;
    esac
done
if [ -e "$failed" ]; then
    grep -v -i 'is ignored: it is neither a file nor' "$log" >&2 || true
    explain >&2
    exit 1
fi
cp "$requirements" "$stamp"
