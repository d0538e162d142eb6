import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml

from oelm.cli import main
from oelm.cli.train import parse_config
from oelm.train.lock import FolderLock

TINY = {
    "method": {"base": "oelm_v2", "qk": {"rank": 2}},
    "model": {
        "preset": "nano",
        "n_layers": 1,
        "d_model": 16,
        "n_heads": 2,
        "d_ff": 32,
        "seq_len": 16,
    },
    "max_steps": 3,
    "batch_size": 2,
    "warmup": 1,
    "eval_interval": 2,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture
def file(tiny_dataset, tmp_path):
    path = tmp_path / "run.yaml"
    config = {**TINY, "dataset": str(tiny_dataset), "out_dir": str(tmp_path / "run")}
    path.write_text(yaml.safe_dump(config))
    return path


def code(*argv):
    with pytest.raises(SystemExit) as stop:
        main(["train", *map(str, argv)])
    return stop.value.code


def test_the_sources_own_spelling_works():
    command = (
        "--model_type oelm_v2 --dataset tinystories --max_lr 1e-3 --max_steps 100000 --batch_size 8 "
        "--eval_interval 1000 --save_interval 5000 --seed 3 --resume --out_dir outputs/GPT-02"
    )
    config = parse_config(shlex.split(command))
    assert config.resolved_method().name == "oelm_v2"
    assert (config.max_lr, config.max_steps, config.seed) == (1e-3, 100_000, 3)
    assert str(config.out_dir) == "outputs/GPT-02"
    assert config.resume


def test_the_defaults_are_the_sources_recipe():
    config = parse_config([])
    assert config.model_config().d_model == 512
    assert (config.weight_decay, config.clip, config.dropout) == (0.1, 1.0, 0.1)
    assert (config.warmup_steps, config.schedule, config.batch_size) == (2000, "cosine", 8)
    assert config.last_lr == pytest.approx(config.max_lr / 10)
    assert (config.eval_interval, config.save_interval) == (1000, 5000)


def test_options_win_over_the_file(file):
    config = parse_config(["--config", str(file), "--max-steps", "7", "--track", "tensorboard"])
    assert config.max_steps == 7
    assert config.method == TINY["method"]
    assert config.track == ("tensorboard",)
    assert parse_config([f"--config={file}", "--method", "baseline"]).method == "baseline"


def test_a_run_and_the_same_again_and_again_from_its_own_config(file, tmp_path, capsys):
    assert code("--config", file) == 0
    assert code("--config", file) == 0
    assert "is finished already" in capsys.readouterr().err
    again = tmp_path / "again"
    assert code("--config", tmp_path / "run" / "config.yaml", "--out_dir", again) == 0
    one, two = ((f / "metrics.jsonl").read_text() for f in (tmp_path / "run", again))
    losses = [[yaml.safe_load(line)["loss"] for line in text.splitlines()] for text in (one, two)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--max_lrr", "1"], "unknown option of oelm train '--max-lrr'; did you mean '--max-lr'?"),
        (["--max_lr", "-1"], "max_lr must be above 0, not -1.0"),
        (["--method", "oelm_v3"], "unknown method 'oelm_v3'; did you mean 'oelm_v2'?"),
        (["--dataset", "nowhere"], "no dataset 'nowhere'"),
        (["--config", "nowhere.yaml"], "no file at nowhere.yaml"),
        (["--max_lr", "high"], "--max-lr: 'high' is not a number; see `oelm train --help`"),
        (["--schedule", "cosinus"], "invalid choice 'cosinus'"),
        (["--batch_size", "3", "--grad_accumulation", "2"], "not divisible by grad_accumulation 2"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(options, line, capsys):
    assert code(*options) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_an_unknown_key_of_the_file_is_refused(file, capsys):
    file.write_text(file.read_text() + "max_lrr: 1\n")
    assert code("--config", file) == 2
    assert "'max_lrr'; did you mean 'max_lr'?" in capsys.readouterr().err


def test_the_other_exit_codes(file, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FolderLock(tmp_path / "run"):
        assert code("--config", file) == 5
    assert f"process {os.getpid()}" in capsys.readouterr().err
    wild = ["--max_lr", "1e30", "--clip", "0", "--warmup", "0", "--max_steps", "20"]
    assert code("--config", file, *wild, "--out_dir", tmp_path / "wild") == 4
    assert "not finite" in capsys.readouterr().err


def test_a_signal_ends_a_real_process_with_code_3(file, tmp_path):
    command = [
        sys.executable,
        "-m",
        "oelm",
        "train",
        "--config",
        str(file),
        "--max_steps",
        "1000000",
    ]
    process = subprocess.Popen(
        [*command, "--eval_interval", "500000"], stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 100
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < until
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3
    assert "oelm: stopped by SIGINT at step" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "last.pt").exists()


def test_the_switch_of_the_source_scripts_chooses_the_twin():
    assert (
        parse_config(["--model_type", "oelm", "--freeze_qk", "false"]).method == "oelm_v1_no_freeze"
    )
    assert parse_config(["--model_type", "oelm", "--freeze_qk", "true"]).method == "oelm"
    assert parse_config(["--model_type", "oelm"]).method == "oelm"
