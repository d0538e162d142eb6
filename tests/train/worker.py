"""One rank of several: trains the given configurations one after the other, and says how each ended."""

import json
import os
import signal
import sys
from pathlib import Path

import yaml

from oelm.config import from_mapping
from oelm.train.config import TrainConfig
from oelm.train.errors import RunError
from oelm.train.loop import Trainer, train


def main(jobs):
    rank = int(os.environ["RANK"])
    original = Trainer.step
    for job in jobs:
        os.environ["MASTER_PORT"] = str(job["port"])

        def step(self, batch, job=job):
            result = original(self, batch)
            # A signal that reaches one rank only must stop all of them, at the same step.
            if rank == 1 and self.state.progress.step == job.get("stop_at"):
                os.kill(os.getpid(), signal.SIGUSR1)
            return result

        Trainer.step = step
        try:
            train(from_mapping(TrainConfig, job["config"], what="job"))
            outcome = "finished"
        except RunError as error:
            outcome = str(error)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(yaml.safe_load(Path(sys.argv[1]).read_text()))
