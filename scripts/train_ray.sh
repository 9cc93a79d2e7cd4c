#!/usr/bin/env bash
# Train on a Ray cluster with a shared file system, from any place that can reach its dashboard:
#   RAY_ADDRESS=http://head:8265 scripts/train_ray.sh model=qwen3_vl_8b model.path=DIR ... run=/shared/run
# The nodes need megatron_vlm[ray] installed. Ray keeps the job's logs: ray job logs ID.
set -euo pipefail
: "${RAY_ADDRESS:?http://HEAD:8265 of the cluster}"
exec ray job submit --address "$RAY_ADDRESS" -- megatron-vlm train launch=ray "$@"
