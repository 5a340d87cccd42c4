#!/bin/bash
# PrologSlurmctld of slurm.conf: cancels a job whose training does not fit, before it holds any node.
# A job asks for it with: sbatch --comment='parsim: /shared/run.yaml --gpus 16xh100-sxm' train.sbatch
# It runs as the user of the job. An answer that is uncertain, or an error, stops nothing: both are in the log alone.
export PATH="${PARSIM_PATH:+$PARSIM_PATH:}/usr/local/bin:/usr/bin:/bin"

comment=$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -oP '\bComment=parsim: \K.*?(?= \w+=|$)')
[[ -n $comment ]] || exit 0
read -ra words <<<"$comment"
answer=$(timeout "${PARSIM_TIMEOUT_S:-60}" runuser -u "$SLURM_JOB_USER" -- parsim check "${words[@]}" 2>&1)
status=$?
logger -t parsim "job $SLURM_JOB_ID: status $status: $answer"
if ((status == 3)); then
  scontrol update JobId="$SLURM_JOB_ID" AdminComment="parsim: $(grep -m1 '^Does not fit' <<<"$answer")"
  scancel "$SLURM_JOB_ID"
fi
exit 0
