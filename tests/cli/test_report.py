import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from oelm.cli import main
from oelm.cli import report as command

sys.path.append(str(Path(__file__).parents[1] / "analysis"))
from synthetic import write_run, write_study

ARMS = {"baseline": ("baseline", 42.0), "frozen": ("oelm_v2", 46.0)}


@pytest.fixture
def oelm(capsys):
    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["report", *argv])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def test_verdicts_and_paths_are_printed(oelm, tmp_path):
    folder = write_study(tmp_path, arms=ARMS, seeds=(0, 1, 2))
    code, out, err = oelm(str(folder))
    assert (code, err) == (0, "")
    first, *_, last = out.splitlines()
    assert first.startswith("refuted    success: Validation perplexity of frozen at most 5")
    assert last == str(folder / "report.html")
    assert (folder / "report.html").stat().st_size > 1e6


def test_formats_folder_and_language_can_be_chosen(oelm, tmp_path):
    folder = write_study(tmp_path, arms=ARMS, seeds=(0, 1))
    code, _, _ = oelm(
        str(folder), "--format", "md,pdf", "--out", str(tmp_path / "out"), "--lang", "zh"
    )
    assert code == 0
    assert (tmp_path / "out" / "report.md").read_text().startswith("# 报告：synthetic")
    assert (tmp_path / "out" / "report.pdf").is_file()
    assert (tmp_path / "out" / "pictures" / "val.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "report.html").exists()


def test_a_study_is_found_by_its_name(oelm, tmp_path, monkeypatch):
    write_study(tmp_path / "results", name="mine", arms=ARMS, seeds=(0, 1))
    monkeypatch.chdir(tmp_path)
    assert oelm("mine")[0] == 0
    assert (tmp_path / "results" / "mine" / "report.html").is_file()


def test_single_runs_and_references_write_to_a_folder_of_their_own(oelm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a = write_run(tmp_path / "a", method="baseline")
    b = write_run(tmp_path / "b", method="oelm_v2", final=46)
    code, out, _ = oelm(str(a), str(b))
    assert (code, out) == (0, "report/report.html\n")
    assert "oelm_v2 differs from baseline by +" in (tmp_path / "report" / "report.html").read_text()
    code, out, _ = oelm("reference:tinystories")
    assert (code, out.count("undecided")) == (0, 3)


def test_what_is_wrong_is_said_on_stderr_and_in_the_report(oelm, tmp_path):
    folder = write_study(tmp_path, arms=ARMS, seeds=(0, 1))
    write_run(
        folder / "frozen" / "seed-1", method="oelm_v2", seed=1, state="failed", error="loss is nan"
    )
    metrics = folder / "baseline" / "seed-0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "tr')
    code, out, err = oelm(str(folder))
    assert code == 0
    page = (folder / "report.html").read_text()
    for said in ("frozen/seed-1: failed at step 150: loss is nan", "is cut off", "different seeds"):
        assert said in err
        assert said in page
    assert out.startswith("undecided  success")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "name a study"),
        (["nowhere"], "no study or run at 'nowhere'"),
        (["reference:tinystorys"], "did you mean 'tinystories'"),
        (["reference:tinystories", "--format", "docx"], "unknown format 'docx'"),
        (["reference:tinystories", "--format", ","], "name a format"),
        (["reference:tinystories", "--lang", "fr"], "lang"),
        (["reference:tinystories", "--fromat", "md"], "did you mean '--format'"),
        (["reference:tinystories", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(oelm, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = oelm(*argv)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_live_rewrites_the_page_until_the_study_has_ended(oelm, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "EVERY", 0.1)
    folder = write_study(tmp_path, arms=ARMS, seeds=(0, 1))
    last = {"method": "oelm_v2", "seed": 1, "final": 46.0}
    write_run(folder / "frozen" / "seed-1", **last, state="running")
    page, seen = folder / "report.html", []

    def finish():
        while not page.exists():
            time.sleep(0.05)
        seen.append('"reload": 10' in page.read_text())
        write_run(folder / "frozen" / "seed-1", **last)

    other = threading.Thread(target=finish)
    other.start()
    code, out, _ = oelm(str(folder), "--live")
    other.join()
    assert (code, seen) == (0, [True])
    assert '"reload": 0' in page.read_text()
    assert out.count("refuted    success") == 1


def test_the_command_imports_no_torch(tmp_path):
    script = (
        "import sys\nfrom oelm.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    asked = ["report", "reference:openwebtext", "--out", str(tmp_path)]
    assert (
        subprocess.run([sys.executable, "-c", script, *asked], capture_output=True).returncode == 0
    )
