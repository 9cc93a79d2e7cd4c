#!/usr/bin/env bash
# Several machines that see one file system. Start it on each of them, with the same words:
#   NODES=2 NODE=0 MASTER=host-a scripts/train_nodes.sh model=qwen3_vl_8b ... run=/shared/run
#   NODES=2 NODE=1 MASTER=host-a scripts/train_nodes.sh model=qwen3_vl_8b ... run=/shared/run
# A lost process restarts all of them from the last checkpoint, up to RESTARTS times.
set -euo pipefail
: "${NODES:?how many machines}" "${NODE:?the number of this one, from 0}" "${MASTER:?name or address of machine 0}"
processes=${PROCESSES:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
if [ "$processes" -eq 0 ]; then
  echo "train_nodes.sh: no GPU here; set PROCESSES" >&2
  exit 2
fi
exec torchrun \
  --nnodes="$NODES" --node-rank="$NODE" --nproc-per-node="$processes" \
  --master-addr="$MASTER" --master-port="${PORT:-29500}" --max-restarts="${RESTARTS:-0}" \
  -m megatron_vlm.train "$@"
