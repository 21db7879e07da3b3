#!/bin/bash
#SBATCH --job-name=fashion
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=0:30:00
#SBATCH --partition=short
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120

set -euo pipefail
export PATH=/opt/paceline/bin:"$PATH"
set +u  # the lines of --setup
source ~/paceline/bin/activate
set -u
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# One process per task; when one fails, the others are ended.
code=0
srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" paceline train --model cnn --data fashion-mini --strategy allreduce --epochs 3 --out runs/slurm --resume auto --threads "$OMP_NUM_THREADS" || code=$?

# 75: the run has left with a checkpoint before the time limit. The next start goes on.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
