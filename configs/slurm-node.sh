#!/bin/bash
# A node as a Slurm job, without Dask: sbatch configs/slurm-node.sh JOIN_FILE [ARGUMENTS OF prorl node]
# One job, one node; an array of them is as many nodes: sbatch --array=1-8 configs/slurm-node.sh JOIN_FILE
# What a node may use is the job's: sbatch --cpus-per-task=16 --mem=64G ...; its log is slurm-*.out of the folder where sbatch was called.
# Several hosts in one job: sbatch --nodes=4 configs/slurm-node.sh JOIN_FILE (one task, one node each)
#SBATCH --job-name=prorl-node
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
# A job that is pre-empted comes back under its name; its log goes on.
#SBATCH --requeue
#SBATCH --open-mode=append
# To the step, ten minutes (service.drain_s) and a minute before the end: nothing new, end what is in hand.
#SBATCH --signal=USR1@660
set -euo pipefail
join=${1:?the join file: ROOT/join/node.json of the service}
shift
unset PYTHONPATH PYTHONHOME
export TMPDIR=${SLURM_TMPDIR:-/tmp} JOIN=$join # node-local and short: sockets have 107 bytes
# An array's task is ARRAY_TASK, as squeue prints it. Its SLURM_JOB_ID does not serve: one task has the array's own, the others have
# numbers that nobody chose.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
LEFT=$(squeue -h -j "$JOB" -o %L)
export JOB LEFT PRORL=${PRORL:-prorl}
# A step, since Slurm tells only steps at once that they are pre-empted; `exec` hands its signals on. The name is the job's with
# the step's task, 0 on the first host: a job that is put back into the queue keeps it, and its newest start counts.
exec srun --kill-on-bad-exit=0 bash -c 'exec "$PRORL" node "$JOIN" --name "n-$JOB-$SLURM_PROCID" --walltime "$LEFT" "$@"' node "$@"
