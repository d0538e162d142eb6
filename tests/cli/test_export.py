import subprocess
import sys

import pytest

from oelm.cli import main


def test_a_run_that_is_none_is_one_line_and_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path), "--to", str(tmp_path / "out")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error == f"oelm: {tmp_path} is no run folder: it has no config.yaml\n"


def test_help_needs_no_torch():
    script = (
        "import sys; from oelm.cli.export import export\n"
        "try: export(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_to_is_needed(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path)])
    assert stop.value.code == 2
    assert "--to" in capsys.readouterr().err
