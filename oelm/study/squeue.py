"""What Slurm's queue says about our jobs. Quick to import, for `oelm status`."""

import getpass
import shutil
import subprocess
from pathlib import Path

from oelm.study.folders import read_json


def jobs() -> dict[str, str] | None:
    """Our jobs that Slurm knows to be waiting or running, and their states; None if it does not answer."""
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%i|%T"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(line.split("|", 1) for line in found.stdout.split())


def job_of(folder: Path) -> str | None:
    """The job that was last submitted for a run."""
    about = read_json(folder / "slurm.json")
    return str(about["job"]) if about else None


def cancel_waiting(folders: list[Path]) -> int:
    """Take runs that have not started out of Slurm's queue; running ones see the stop mark."""
    known = jobs() or {}
    unstarted = [j for f in folders if (j := job_of(f)) and known.get(j) == "PENDING"]
    if unstarted:
        subprocess.run(["scancel", *unstarted], check=True, capture_output=True)
    return len(unstarted)
