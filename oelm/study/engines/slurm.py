"""Runs as Slurm jobs, through submitit: one job per run, which saves and goes back into the queue
when its time is up or a more important job needs the node. No torch.
"""

import contextlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from oelm.errors import UserError
from oelm.study.folders import final_failure, write_json
from oelm.study.plan import Run, SlurmNeeds, essence
from oelm.study.queue import LOCKED, STOPPED, Queue, write_config
from oelm.study.squeue import job_of, jobs

POLL_SECONDS = 0.5
# How long a job whose trainer was told to stop, not by us, waits for Slurm to end it.
PATIENCE_SECONDS = 600.0
LOCKED_SECONDS = 20.0
SAVE_SECONDS = 120
"""How long before the time limit, or the end of a grace period, a job is told to save."""


class Job:
    """What a job does. submitit calls it, and calls `checkpoint` when the job must make room."""

    def __init__(self, run: Run, folder: Path, needs: SlurmNeeds, processes: int) -> None:
        self.run, self.folder, self.needs, self.processes = run, folder, needs, processes
        self.config = write_config(run)
        self._pid: int | None = None

    def __call__(self) -> str:
        """Train the run to its end, again from its last checkpoint after a crash."""
        queue = Queue(self.folder / "study.yaml", self.folder.parent)
        planned = {r.name: r for r in queue.all_runs}.get(self.run.name)
        if planned is None or essence(planned.config) != essence(self.run.config):
            return "the study has changed since this job was submitted"
        where = f"slurm {os.environ.get('SLURM_JOB_ID', '?')}"
        if os.environ.get("SLURM_NODEID", "0") != "0":  # the first node keeps the books
            return f"exit code {self._train(queue, where)[0]}"
        outcome = "nothing to do"
        while not (
            queue.done(self.run) or final_failure(self.run.folder) or _stops(queue, self.run)
        ):
            code, asked = self._train(queue, where)
            if code == STOPPED and not asked:
                # Slurm tells every process of a job that it will requeue, preempt or cancel. If we
                # ended by ourselves now, the job would count as complete and not come back.
                time.sleep(PATIENCE_SECONDS)
                continue
            outcome = queue.ended(self.run, code, where, asked=asked)
            print(f"{self.run.name}: {outcome}", flush=True)
            if (
                code == LOCKED
            ):  # by a node that died and looks alive for a minute, or a second runner
                time.sleep(LOCKED_SECONDS)
        return outcome

    def checkpoint(self) -> Any:
        """Have the trainer save, and come back as the same job."""
        from submitit.helpers import DelayedSubmission

        if self._pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                trainer = psutil.Process(self._pid)
                trainer.terminate()
                # Not `wait()`: the code that this handler interrupted is waiting for it.
                while trainer.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.1)
        self._pid = None
        return DelayedSubmission(self)

    def _train(self, queue: Queue, where: str) -> tuple[int, bool]:
        """One attempt: the trainer's exit code, and whether `oelm stop` ended it."""
        share = (self.needs.cpus_per_task or 1) // (self.processes // self.needs.nodes)
        threads = self.run.config.threads or max(1, share)
        argv = ["-m", "oelm", "train", "--config", str(self.config), "--threads", str(threads)]
        command = [sys.executable, *self._torchrun(), *argv]
        with (self.run.folder / "console.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, "OELM_WHERE": where},
                preexec_fn=_ignore_submitits_signal,
            )
        self._pid = process.pid
        asked, began = False, time.time()
        while (code := process.poll()) is None:
            if not asked and _stops(queue, self.run):
                process.terminate()
                asked = True
            time.sleep(POLL_SECONDS)
        # `oelm stop` may have told the trainer before we looked.
        return queue.meant(self.run, code, began), asked or _stops(queue, self.run)

    def _torchrun(self) -> list[str]:
        """Several processes train one run: torchrun on each node, which restarts them together."""
        if self.processes == 1:
            return []
        options = [f"--nproc-per-node={self.processes // self.needs.nodes}"]
        if self.needs.nodes == 1:
            return ["-m", "torch.distributed.run", "--standalone", *options]
        job = int(os.environ["SLURM_JOB_ID"])
        return [
            "-m",
            "torch.distributed.run",
            *options,
            *rendezvous(_first_host(), job, self.needs.nodes),
        ]


def rendezvous(host: str, job: int, nodes: int) -> list[str]:
    """torchrun's options by which the nodes of a job find each other, at a port of the job's own."""
    endpoint = f"--rdzv-endpoint={host}:{20000 + job % 20000}"
    named = ["--rdzv-backend=c10d", endpoint, f"--rdzv-id={job}"]
    return [f"--nnodes={nodes}", *named, "--max-restarts=2"]


def require_slurm() -> None:
    """Refuse a machine that has no Slurm, or no submitit, before anything is written."""
    for command in ("sbatch", "srun", "squeue", "scontrol"):
        if shutil.which(command) is None:
            raise UserError(
                f"Slurm's `{command}` was not found; run this on a login node, or with --on local"
            )
    if importlib.util.find_spec("submitit") is None:
        raise UserError("Slurm needs submitit: pip install 'oelm[slurm]'")


def submit(queue: Queue, needs: SlurmNeeds, gpus_per_run: int) -> dict[str, str]:
    """Submit what is neither done nor in Slurm's queue already; returns job ids by run."""
    from submitit import SlurmExecutor

    known = jobs()
    if known is None:
        raise UserError(
            "Slurm's `squeue` did not answer, so what is queued is not known; try again"
        )
    waiting = [r for r in queue.startable() if job_of(r.folder) not in known]
    if not waiting:
        return {}
    uses_gpus = any(r.config.device != "cpu" for r in waiting)
    if uses_gpus and gpus_per_run % needs.nodes:
        raise UserError(f"gpus_per_run {gpus_per_run} cannot be divided over {needs.nodes} nodes")
    processes = gpus_per_run if uses_gpus or gpus_per_run > 1 else needs.nodes
    per_node = f"gpu:{gpus_per_run // needs.nodes}" if uses_gpus else None
    # submitit calls a job whose limit is short timed out, whatever it was told: let it come back.
    executor = SlurmExecutor(folder=queue.folder / ".slurm" / "%A", max_num_timeout=10_000)
    wanted = {
        "partition": needs.partition,
        "account": needs.account,
        "gres": needs.gres or per_node,
        "cpus_per_task": needs.cpus_per_task,
        "mem": needs.mem,
    }
    executor.update_parameters(
        job_name=f"oelm-{queue.study.name}",
        time=needs.time,
        nodes=needs.nodes,
        ntasks_per_node=1,
        signal_delay_s=min(SAVE_SECONDS, needs.time * 60 // 2),
        array_parallelism=len(waiting),
        **{k: v for k, v in wanted.items() if v is not None},
    )
    try:
        # submitit would show sbatch's complaint as well.
        with contextlib.redirect_stderr(io.StringIO()), executor.batch():
            submitted = [executor.submit(Job(r, queue.folder, needs, processes)) for r in waiting]
    except Exception as error:  # submitit wraps sbatch's complaint in its own
        raise UserError(f"Slurm refused the jobs: {_complaint(error)}") from None
    for run, job in zip(waiting, submitted, strict=True):
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / "slurm.json", {"job": job.job_id, "time": time.time()})
    return {run.name: job.job_id for run, job in zip(waiting, submitted, strict=True)}


def _stops(queue: Queue, run: Run) -> bool:
    return queue.stop_wanted() or queue.stop_wanted(run)


def _ignore_submitits_signal() -> None:
    # Slurm sends it to every process of the job; the trainer is told by us, when we are ready.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _first_host() -> str:
    from submitit import JobEnvironment

    return str(JobEnvironment().hostnames[0])


def _complaint(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "error" in line.lower()]
    return lines[-1] if lines else str(error).splitlines()[0] if str(error) else repr(error)
