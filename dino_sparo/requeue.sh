# status, folder, max_requeues, fault_statuses and do_not_requeue are set by the lines above; see submit.py.
if [ ! -e "$folder/$do_not_requeue" ] && [[ " $fault_statuses " == *" $status "* ]] &&
    scontrol -o show job $SLURM_JOB_ID | grep -q 'JobState=RUNNING'; then
  echo "$(date -Is) exit status $status" >> "$folder/faults"
  count=$(wc -l < "$folder/faults")
  if [ "$count" -le "$max_requeues" ]; then
    echo "exit status $status: requeued ($count of at most $max_requeues times)" >&2
    for try in 1 2 3 4 5; do scontrol requeue $SLURM_JOB_ID && sleep 60 && break; sleep 10; done
  else
    echo "exit status $status: not requeued again, --max_requeues is $max_requeues" >&2
  fi
fi
exit $status
