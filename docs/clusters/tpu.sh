#!/bin/bash
# A Cloud TPU slice, made with gcloud: v5p-256 is 128 chips on 32 hosts, one process a host.
#
#     bash docs/clusters/tpu.sh configs/my_run.py
#
# `--distributed.cluster jax` lets JAX ask the metadata server who belongs to the slice. The mesh has to use all chips.
# RUN_DIR is in a bucket that Cloud Storage FUSE mounts on every host. Make the bucket with hierarchical namespace: only
# there is the renaming of a folder, which completes a checkpoint, atomic.
# Run the same command again after a host was lost (exit code 75): it goes on from the newest checkpoint, or from the
# first step when there is none yet.
set -eu
CONFIG=${1:?usage: bash docs/clusters/tpu.sh CONFIG}
: "${PROJECT:?set PROJECT}" "${ZONE:?set ZONE}" "${BUCKET:?set BUCKET}"
NAME=${NAME:-ring-jax}
ACCELERATOR=${ACCELERATOR:-v5p-256}
REPOSITORY=${REPOSITORY:-$(git remote get-url origin)}
RUN_DIR=/mnt/runs/$(basename "$CONFIG" .py)

if ! gcloud compute tpus tpu-vm describe "$NAME" --project="$PROJECT" --zone="$ZONE" >/dev/null 2>&1; then
    gcloud compute tpus tpu-vm create "$NAME" --project="$PROJECT" --zone="$ZONE" \
        --accelerator-type="$ACCELERATOR" --version=v2-alpha-tpuv5
fi

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" --worker=all --command="$1"
}

on_all_hosts "
set -eu
[ -d ring_jax ] || git clone '$REPOSITORY' ring_jax
cd ring_jax && [ -d .venv ] || (make setup && .venv/bin/python -m pip install -U 'jax[tpu]')
sudo mkdir -p /mnt/runs && sudo chown \$USER /mnt/runs
mountpoint -q /mnt/runs || gcsfuse --implicit-dirs '$BUCKET' /mnt/runs
"

on_all_hosts "
cd ring_jax
mkdir -p '$RUN_DIR'
exec .venv/bin/python -m train run '$CONFIG' --run-dir '$RUN_DIR' \
    --distributed.cluster jax --distributed.start-timeout 600 --resume
"
