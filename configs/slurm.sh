#!/bin/bash
# One launcher a node under Slurm; begun again by itself after a time limit, a preemption or a lost node, and goes on.
#   sbatch --nodes=2 --gres=gpu:4 configs/slurm.sh configs/xcomposer-lora.yaml data.shards=/shared/shards run.dir=/shared/run
# Arguments are those of `xctrain launch`. run.dir and data.shards lie on a file system that all nodes share.
#SBATCH --job-name=xctrain
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
# 300 s before the time limit every rank is asked to finish its step and save: exit code 75.
set -uo pipefail

GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-1}}
export MASTER_NODE
MASTER_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_NODE+=:$((20000 + SLURM_JOB_ID % 20000)) # another one for each job, as two jobs may share a node

srun --kill-on-bad-exit=1 bash -c '
  exec .venv/bin/python -m xctrain launch "$@" --processes "$0" --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --master "$MASTER_NODE"' "$GPUS" "$@" &
step=$!
trap 'kill -TERM $step' TERM
wait $step
code=$?
while kill -0 $step 2> /dev/null; do # the trap ended the first wait
  wait $step
  code=$?
done
if [ $code -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
