#!/bin/sh
# Prints the Python to make the virtual environment from; with none, says on stderr what is missing and exits with 1.
# PYTHON=... in the environment names one and is then the only candidate. Every candidate is run: a name on PATH proves
# nothing (pyenv has a `python3.13` there for versions that are switched off).

set -u
preferred="3.13 3.12 3.14" # the pinned packages have wheels for these
notes=""

# Prints "VERSION PROBLEM", in a form of Python that any version can run.
probe='
import sys
lacking = []
for name in ("ensurepip", "ssl", "venv", "zlib"):
    try:
        __import__(name)
    except ImportError:
        lacking.append(name)
problem = "lacks the modules: " + ", ".join(lacking) if lacking else ""
if "t" in getattr(sys, "abiflags", ""):
    problem = "is a free-threaded build"
print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], problem))
'

# Prints the candidate and ends the script when it will do; otherwise notes why not.
consider() {
    case "$notes" in *"    $1: "*) return ;; esac
    answer=$("$1" -c "$probe" 2>/dev/null </dev/null) || answer=""
    release=${answer%% *}
    problem=${answer#* }
    case $release in
    "") reason="does not run" ;;
    2.* | 3.? | 3.10 | 3.11) reason="Python $release, too old" ;;
    3.12 | 3.13 | 3.14)
        if [ -z "$problem" ]; then
            printf '%s\n' "$1"
            exit 0
        fi
        reason="Python $release, but it $problem"
        case "$problem" in
        *ensurepip* | *venv*) reason="$reason (Debian, Ubuntu: apt install python$release-venv)" ;;
        esac
        ;;
    *) reason="Python $release, for which the pinned packages have no wheels" ;;
    esac
    notes="$notes
    $1: $reason"
}

# Considers the programs of this name in every directory on PATH.
consider_on_path() {
    old_ifs=$IFS
    IFS=:
    set -f
    for directory in $PATH; do
        if [ -n "$directory" ] && [ -x "$directory/$1" ]; then
            consider "$directory/$1"
        fi
    done
    set +f
    IFS=$old_ifs
}

if [ -n "${PYTHON:-}" ]; then
    if found=$(command -v "$PYTHON"); then
        consider "$found"
    else
        notes="
    $PYTHON: no such program"
    fi
    echo "error: PYTHON=$PYTHON will not do; it must be a Python 3.12, 3.13 or 3.14:$notes" >&2
    echo "  fix: name another one, or leave PYTHON unset and one is looked for" >&2
    exit 1
fi

for version in $preferred; do
    consider_on_path "python$version"
done
consider_on_path python3
consider_on_path python
for version in $preferred; do
    for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python; do
        if [ -x "$candidate" ]; then
            consider "$candidate"
        fi
    done
done

{
    echo "error: no Python 3.12, 3.13 or 3.14 on PATH or among pyenv's versions. Looked at:${notes:-
    nothing: there is no program named python3 or python}"
    echo "  fix: install one (Debian, Ubuntu: apt install python3.12 python3.12-venv; macOS: brew install python@3.13;"
    echo "       pyenv: pyenv install 3.13), or name one that is elsewhere: make test PYTHON=/path/to/python3.13"
} >&2
exit 1
