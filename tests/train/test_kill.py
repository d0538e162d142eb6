"""Real processes, really killed; what they leave must continue to the same bits."""

import os
import random
import subprocess
import sys
import time

import pytest
import yaml

from oelm.config import to_mapping
from oelm.train.loop import train
from tests.train.runs import assert_same_run


def start(config, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_mapping(config)))
    command = [sys.executable, "-m", "oelm", "train", "--config", str(path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def kill_at_step(process, folder, step, rest):
    """Kill once the metrics have reached `step`, after a further rest."""
    metrics = folder / "metrics.jsonl"
    while process.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if any(f'"step": {step},' in line for line in lines[-3:]):
            time.sleep(rest)
            break
        time.sleep(0.001)
    return end(process)


def kill_inside_a_save(process, folder):
    """Kill while a checkpoint is half written; true if that is what it left."""
    half = folder / "last.pt.tmp"
    while process.poll() is None and not half.exists():
        pass
    return end(process) and half.exists()


def end(process):
    killed = process.poll() is None
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (-9, 0), errors
    return killed


def survive(tiny, tmp_path, steps, kills_at, saves, seed):
    settings = {"max_steps": steps, "log_interval": 1, "save_interval": 4, "eval_interval": 10}
    settings |= {"method": "oelm_thaw", "thaw_warmup": 5}
    draw = random.Random(seed)
    print("seed", seed)
    whole = train(tiny("whole", **settings))
    config = tiny("killed", **settings)
    config.out_dir.mkdir()
    for step in sorted(draw.sample(range(1, steps), kills_at)):
        process = start(config, tmp_path)
        assert kill_at_step(process, config.out_dir, step, draw.uniform(0, 0.02))
        for leftover in config.out_dir.glob("*.tmp"):
            print("killed inside the writing of", leftover.name)
    inside = 0
    for _ in range(10 * saves):
        if inside == saves:
            break
        inside += kill_inside_a_save(start(config, tmp_path), config.out_dir)
    assert inside == saves, "the run ended before enough saves were hit"
    last = start(config, tmp_path)
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    assert_same_run(whole, config.out_dir)
    assert not list(config.out_dir.glob("*.tmp"))


def test_a_killed_run_continues_bit_for_bit(tiny, tmp_path):
    survive(tiny, tmp_path, steps=40, kills_at=1, saves=1, seed=int(time.time()))


@pytest.mark.slow
def test_a_run_killed_ten_times_continues_bit_for_bit(tiny, tmp_path):
    seed = int(os.environ.get("KILL_SEED", time.time()))
    survive(tiny, tmp_path, steps=200, kills_at=8, saves=2, seed=seed)
