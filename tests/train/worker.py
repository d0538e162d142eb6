"""One rank of several: trains the given configurations one after the other, and says how each ended."""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
import yaml

from oelm.config import from_mapping
from oelm.freezing import Gates
from oelm.model.gpt import GPT
from oelm.train.config import TrainConfig
from oelm.train.errors import RunError
from oelm.train.loop import Trainer, train


def main(jobs):
    rank = int(os.environ["RANK"])
    original, forward, thaw_steps = Trainer.step, GPT.forward, Gates.thaw_steps

    def poison(self, *batch):
        return forward(self, *batch) * float("nan")

    for job in jobs:
        os.environ["MASTER_PORT"] = str(job["port"])

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
    main(yaml.safe_load(Path(sys.argv[1]).read_text()))
