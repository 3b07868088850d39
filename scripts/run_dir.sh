#!/bin/sh
# usage: scripts/run_dir.sh BASE [the arguments of the run]
# Prints the --run-dir for a run: BASE or, when it exists, BASE-2, BASE-3, ...; with --resume the newest that exists.
# Prints nothing when the arguments name a run directory themselves.

set -eu
base=$1
shift
resume=no
for argument; do
    case $argument in
    --run-dir | --run-dir=* | --run_dir | --run_dir=*) exit 0 ;;
    --resume) resume=yes ;;
    esac
done

directory=$base
number=1
while [ -e "$directory" ]; do
    number=$((number + 1))
    directory=$base-$number
done
if [ "$resume" = yes ]; then
    newest=$(ls -dt "$base" "$base"-[0-9]* 2>/dev/null | head -n 1)
    directory=${newest:-$directory}
fi
echo "--run-dir $directory"
