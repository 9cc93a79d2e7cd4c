#!/usr/bin/env bash
# Train on one machine with all of its GPUs, or with PROCESSES of them, under torchrun:
#   scripts/train_node.sh model=qwen3_vl_2b model.path=DIR data.train=chats.jsonl run=runs/first
# `megatron-vlm train` does the same without torchrun, passes on signals and exit statuses, and
# opens no port to other machines.
set -euo pipefail
processes=${PROCESSES:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
if [ "$processes" -eq 0 ]; then
  echo "train_node.sh: no GPU found; set PROCESSES, or use megatron-vlm train" >&2
  exit 2
fi
# With the secret, ranks recognize messages of other programs: see docs/clusters.md.
export MEGATRON_VLM_SECRET=${MEGATRON_VLM_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d " \n")}
exec torchrun --standalone --nproc-per-node="$processes" -m "${MODULE:-megatron_vlm.train}" "$@"
