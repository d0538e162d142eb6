import json
import subprocess
import sys

import pytest

from oelm.cli import COMMANDS, main
from oelm.version import __version__


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "oelm", *args], capture_output=True, text=True, check=False
    )


def refused(capsys, *args):
    """What a command says on stderr when it refuses its input."""
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_names_every_command(capsys):
    main(["--help"])
    text = capsys.readouterr().out
    assert [n for n in COMMANDS if f"  {n} " not in text] == []


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"oelm {__version__}\n"


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from oelm.cli import main; main(['--help']);"
        "print([m for m in ('torch', 'numpy', 'tyro', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_and_command_are_one():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"oelm {__version__}\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["methods", "--modle", "nano"], "unknown option of oelm methods '--modle'; did you mean '--model'?"),
        (["methods", "--model", "nanno"], "unknown model preset 'nanno'; did you mean 'nano'?"),
        (["methods", "--model", "nano,n_layer=2"], "field of model 'n_layer'; did you mean 'n_layers'?"),
        (["diagnose", "--method", "oelm_v3"], "unknown method 'oelm_v3'; did you mean 'oelm_v2'?"),
        (["diagnose", "--method", "oelm_v2,q.init=headwize"], "'headwize'; did you mean 'headwise'?"),
        (["diagnose", "--model", "nano,n_heads=3"], "d_model 128 is not divisible by n_heads 3"),
        (["diagnose", "--steps", "0"], "steps must be at least 1, not 0"),
        (["diagnose", "--steps", "many"], "--steps: 'many' is not a whole number; see"),
        (["bench", "--explain", "oelm_v2", "baseline"], "drop method baseline, or --explain"),
        (["bench", "--explain", "oelm_v2", "--by-layer"], "drop --by_layer, or --explain"),
        (["bench", "--batch-size", "100000000"], "100,000,000 sequences at a time need about"),
        (["audit", "nowhere"], "there is nothing at nowhere; give a run folder or one of its .pt files"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_plain_line(capsys, args, message):
    line = refused(capsys, *args)
    assert line.startswith("oelm: ")
    assert message in line


def test_an_internal_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "methods", ("methods", "nothing_of_that_name", ""))
    with pytest.raises(AttributeError):
        main(["methods"])


def succeed(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_methods_are_listed_with_their_counts(capsys):
    rows = {row["name"]: row for row in json.loads(succeed(capsys, "methods", "--json"))}
    assert (rows["baseline"]["trainable"], rows["baseline"]["frozen"]) == (44_896_768, 0)
    assert (rows["oelm_v2"]["trainable"], rows["oelm_v2"]["frozen"]) == (41_751_040, 3_145_728)
    assert "oelm_v2" in succeed(capsys, "methods", "--model", "nano")


@pytest.mark.parametrize("option", ["--method", "--model_type", "--model-type"])
def test_diagnose_prints_the_audit(capsys, option):
    result = json.loads(succeed(capsys, "diagnose", option, "oelm_v2", "--model", "nano", "--json"))
    assert result["verdict"] == "pass"
    assert (result["total"], result["frozen"], result["frozen_bytes"]) == (
        1_069_824,
        131_072,
        524_288,
    )
    row = next(t for t in result["tensors"] if t["name"] == "blocks.0.attention.q.weight")
    assert (row["role"], row["moved"], row["in_optimizer"]) == ("frozen", False, False)
    assert row["sha256_before"] == row["sha256_after"]


def test_diagnose_takes_the_switch_of_the_source_scripts(capsys):
    args = ["diagnose", "--model_type", "oelm", "--model", "nano", "--json", "--freeze_qk"]
    assert json.loads(succeed(capsys, *args, "false"))["frozen"] == 0
    assert json.loads(succeed(capsys, *args, "true"))["frozen"] == 131_072


def test_diagnose_shows_a_table_and_a_verdict(capsys):
    text = succeed(capsys, "diagnose", "--model", "nano,n_layers=1")
    assert "blocks.0.attention.q.weight" in text
    assert text.splitlines()[-1] == "verdict: pass"
