"""Real processes, really killed; what they leave must continue to the same bits."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from oelm.config import to_mapping
from oelm.train.loop import train
from tests.train.runs import assert_same_run

ROOT = Path(__file__).parents[2]
PIECES = 170  # every checkpoint of such a run is written in more


def ends(command, config, tmp_path):
    """Train in a process of its own; returns the code it ended with."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_mapping(config)))
    command = [sys.executable, "-m", *command, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode in (-9, 0), done.stderr
    return done.returncode


def survive(tiny, tmp_path, steps, kills_at, saves, seed):
    settings = {"max_steps": steps, "log_interval": 1, "save_interval": 4, "eval_interval": 10}
    settings |= {"method": "oelm_thaw", "thaw_warmup": 5}
    draw = random.Random(seed)
    print("seed", seed)
    whole = train(tiny("whole", **settings))
    config = tiny("killed", **settings)
    deaths = [("step", step) for step in sorted(draw.sample(range(1, steps), kills_at))]
    # Every process writes at least one more checkpoint: the one of the last step.
    within = [("save", draw.randrange(1, PIECES)) for _ in range(saves)]
    within += [("rename", draw.choice((1, 2))) for _ in range(saves)]
    for death in within:
        deaths.insert(draw.randrange(len(deaths) + 1), death)
    for place, count in deaths:
        print("dies at", place, count)
        assert ends(["tests.train.dying", place, str(count)], config, tmp_path) == -9
        assert place == "step" or list(config.out_dir.glob("*.tmp"))
    assert ends(["oelm", "train", "--config"], config, tmp_path) == 0
    assert_same_run(whole, config.out_dir)
    assert not list(config.out_dir.glob("*.tmp"))


def test_a_killed_run_continues_bit_for_bit(tiny, tmp_path):
    survive(tiny, tmp_path, steps=40, kills_at=1, saves=1, seed=int(time.time()))


@pytest.mark.slow
def test_a_run_killed_ten_times_continues_bit_for_bit(tiny, tmp_path):
    seed = int(os.environ.get("KILL_SEED", time.time()))
    survive(tiny, tmp_path, steps=200, kills_at=8, saves=2, seed=seed)
