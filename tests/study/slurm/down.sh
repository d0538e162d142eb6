#!/bin/bash
# Stops what up.sh started in FOLDER, by its pid files, and nothing else.
set -uo pipefail
W=$(realpath -m "$1")
. "$W/env.sh"
for ((i = 0; i < 40; i++)); do # jobs first: their steps would outlive slurmd
  [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
  for state in PENDING RUNNING SUSPENDED; do timeout 5 scancel -Q -t $state; done
  sleep 0.5
done
for daemon in slurmd slurmctld munged; do
  pid=$(cat "$W/run/$daemon.pid" 2>/dev/null) || continue
  # A pid file can outlive its process, and the number be somebody else's by now.
  grep -qzsxF "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" || continue
  kill "$pid"
  for ((i = 0; i < 80; i++)); do [ -e "/proc/$pid" ] || break; sleep 0.25; done
done
