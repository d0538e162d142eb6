"""One rank of several: trains the given configurations one after the other, and says how each ended."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist
import yaml

from oelm.config import from_mapping
from oelm.freezing import Gates
from oelm.model.gpt import GPT
from oelm.train.config import TrainConfig
from oelm.train.errors import RunError
from oelm.train.loop import Trainer, train


def meeting_point(file, rank):
    """A port that was free a moment ago: chosen by rank 0, read by the others."""
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            file.with_suffix(".new").write_text(str(probe.getsockname()[1]))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def main(jobs, folder):
    rank = int(os.environ["RANK"])
    original, forward, thaw_steps = Trainer.step, GPT.forward, Gates.thaw_steps

    def poison(self, *batch):
        return forward(self, *batch) * float("nan")

    for number, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = meeting_point(folder / f"port-{number}", rank)

        def step(self, batch, job=job):
            poisoned = rank == 1 and self.state.progress.step == job.get("poison_at")
            GPT.forward = poison if poisoned else forward
            result = original(self, batch)
            GPT.forward = forward
            # A signal that reaches one rank only must stop all of them, at the same step.
            if rank == 1 and self.state.progress.step == job.get("stop_at"):
                os.kill(os.getpid(), signal.SIGUSR1)
            return result

        Trainer.step = step
        # What the loop guards against: DDP that does not learn of a thaw.
        Gates.thaw_steps = (lambda self: []) if job.get("forget_thaw") else thaw_steps
        try:
            train(from_mapping(TrainConfig, job["config"], what="job"))
            outcome = "finished"
        except (RunError, RuntimeError) as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            outcome = str(error)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(yaml.safe_load(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
