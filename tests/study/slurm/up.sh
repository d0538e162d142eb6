#!/bin/bash
# A real one-node Slurm for tests, as root on Debian, without systemd, cgroups or accounting:
#   up.sh FOLDER; source FOLDER/env.sh; ...; down.sh FOLDER
# Everything lives in FOLDER (a short path: unix sockets). Exits with 75 and a reason where it
# cannot be done. Jobs in partition `high` preempt those in `main`.
set -euo pipefail
W=$(realpath -m "$1") PORT=${PORT:-27817} HOST=$(hostname -s)
cannot() { echo "$*"; exit 75; }
[ "$(id -u)" = 0 ] || cannot "starting a Slurm needs root"
[ ${#W} -le 70 ] || cannot "$W is too long a path for unix sockets"
mkdir -p "$W"/{bin,etc,run,log,state,spool,munge}
if ! type slurmctld slurmd munged srun >/dev/null 2>&1; then
  type apt-get >/dev/null 2>&1 || cannot "Slurm is not installed, and this is no Debian"
  get() { DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qy --no-install-recommends slurm-wlm munge; }
  { get || { apt-get update && get; }; } >"$W/log/apt.log" 2>&1 || cannot "apt-get could not install Slurm: $W/log/apt.log"
fi
[ -s "$W/munge/key" ] || (umask 077; head -c 1024 /dev/urandom >"$W/munge/key")

cat >"$W/etc/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$W/munge/socket,cred_expire=5
SlurmctldPidFile=$W/run/slurmctld.pid
SlurmdPidFile=$W/run/slurmd.pid
SlurmctldLogFile=$W/log/slurmctld.log
SlurmdLogFile=$W/log/slurmd.log
StateSaveLocation=$W/state
SlurmdSpoolDir=$W/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=86400
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
CONF
# Without accounting there is no sacct, which submitit asks for the state of a job.
cat >"$W/bin/sacct" <<'SH'
#!/bin/bash
ids=; while [ $# -gt 0 ]; do [ "$1" = -j ] && ids+=",$2"; shift; done
echo "JobID|State|NodeList"; squeue -h -t all -j "${ids#,}" -o "%i|%T|%N"
SH
chmod +x "$W/bin/sacct"
echo "export SLURM_CONF=$W/etc/slurm.conf PATH=$W/bin:\$PATH" >"$W/env.sh"
. "$W/env.sh"

trap '[ $? = 0 ] || "$(dirname "$0")/down.sh" "$W" >&2' EXIT
munged --force --socket="$W/munge/socket" --key-file="$W/munge/key" --pid-file="$W/run/munged.pid" \
  --log-file="$W/log/munged.log" --seed-file="$W/munge/seed" 2>>"$W/log/munged.log"
slurmctld
slurmd
for ((i = 0; i < 120; i++)); do
  [ "$(sinfo -h -p main -o %t 2>/dev/null)" = idle ] && exit 0
  sleep 0.5
done
echo "the node did not become idle; see $W/log"
exit 1
