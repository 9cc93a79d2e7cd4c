#!/usr/bin/env bash
# Train on several machines that share a file system. Start the script on each of them, with the
# same arguments:
#   NODES=2 NODE=0 MASTER=host-a scripts/train_nodes.sh model=qwen3_vl_8b ... run=/shared/run
#   NODES=2 NODE=1 MASTER=host-a scripts/train_nodes.sh model=qwen3_vl_8b ... run=/shared/run
# When a process is lost, all of them start again from the last checkpoint, up to RESTARTS times.
# With LEAST=1 they continue without a machine that is lost, and take it back once it is started
# again (machine 0, which hosts the rendezvous, must stay). Only these machines may reach PORT. All
# of them need the same MEGATRON_VLM_SECRET: see docs/clusters.md.
set -euo pipefail
: "${NODES:?how many machines}" "${NODE:?the number of this one, from 0}" "${MASTER:?name or address of machine 0}"
processes=${PROCESSES:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
if [ "$processes" -eq 0 ]; then
  echo "train_nodes.sh: no GPU found; set PROCESSES" >&2
  exit 2
fi
# Otherwise a machine that comes back waits for an address that is written only once (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
meets_here=$([ "$NODE" -eq 0 ] && echo true || echo false)
exec torchrun \
  --nnodes="${LEAST:-$NODES}:$NODES" --nproc-per-node="$processes" --max-restarts="${RESTARTS:-0}" \
  --rdzv-backend=c10d --rdzv-endpoint="$MASTER:${PORT:-29500}" --rdzv-id=megatron-vlm \
  --rdzv-conf="is_host=$meets_here" -m "${MODULE:-megatron_vlm.train}" "$@"
