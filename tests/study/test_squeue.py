import pytest

from oelm.errors import UserError
from oelm.study.engines import slurm
from oelm.study.plan import SlurmNeeds
from oelm.study.queue import STOPPED, Queue
from oelm.study.squeue import jobs


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Put a `squeue` that runs this shell line first on the path."""

    def write(line):
        program = tmp_path / "bin" / "squeue"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    return write


def test_jobs_and_their_states(squeue):
    squeue("echo '12|RUNNING'; echo '13_0|PENDING'")
    assert jobs() == {"12": "RUNNING", "13_0": "PENDING"}


def test_a_queue_that_does_not_answer_is_not_an_empty_one(squeue, make_study):
    pytest.importorskip("submitit")
    squeue("exit 1")
    assert jobs() is None
    queue = Queue(make_study())
    queue.open()
    with pytest.raises(UserError, match="did not answer"):
        slurm.submit(queue, queue.study.needs.slurm, 1)


def test_a_job_whose_trainer_was_stopped_before_it_looked_knows_that(make_study, monkeypatch):
    queue = Queue(make_study())
    queue.open()
    job = slurm.Job(queue.runs[0], queue.folder, SlurmNeeds(), 1)
    trainer = queue.folder / "trainer"
    trainer.write_text(f"#!/bin/sh\necho now > {queue.folder}/stop\nexit {STOPPED}\n")
    trainer.chmod(0o755)
    monkeypatch.setattr(slurm.sys, "executable", str(trainer))
    assert job._train(queue, "here") == (STOPPED, True)
