#!/usr/bin/env bash
# Slurm: sbatch scripts/train_slurm.sh model=qwen3_vl_8b model.path=DIR ... run=/shared/run
# There is one task for each GPU. Slurm sends SIGUSR1 five minutes before the time is up: the run
# saves and exits with status 75; the job is queued again and resumes from there.
#SBATCH --job-name=megatron-vlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ "$SLURM_JOB_NUM_NODES" -eq 1 ]; then
  MASTER_ADDR=127.0.0.1 # no port is opened to other machines
fi
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
# With the secret, ranks recognize messages of other programs: see docs/clusters.md.
export MEGATRON_VLM_SECRET=${MEGATRON_VLM_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d " \n")}
status=0
# shellcheck disable=SC2016 # the variables expand in each task
srun --kill-on-bad-exit=0 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec python -m "${MODULE:-megatron_vlm.train}" "$@"' task "$@" || status=$?
if [ "$status" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
