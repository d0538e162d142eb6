import json

import pytest

from oelm.cli import main


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "datasets"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "tale.txt").write_text("\n\n".join(f"Part {n} of the tale." for n in range(200)))
    return str(tmp_path / "tale.txt")


@pytest.fixture
def oelm(capsys):
    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["data", *argv])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def test_prepare_list_show_check(oelm, text, home):
    code, out, _ = oelm("list")
    assert (code, "nothing in" in out) == (0, True)
    code, out, err = oelm("prepare", text, "--tokenizer", "bytes", "--max_docs", "150")
    assert (code, err) == (0, "")
    assert out.startswith(f"tale-bytes: bytes, 257 tokens; in {home / 'tale-bytes'}\n")
    assert "split: by hash of the document: val 0.05, test 0.05, train the rest\n" in out
    code, out, _ = oelm("list", "--json")
    (row,) = json.loads(out)["datasets"]
    assert row["name"] == "tale-bytes"
    assert sum(row["tokens"].values()) == sum(len(f"Part {n} of the tale.") + 1 for n in range(150))
    code, out, _ = oelm("list")
    assert out.splitlines()[1].split()[:2] == ["tale-bytes", "bytes"]
    code, out, _ = oelm("show", "tale", "--doc", "0", "--split", "val")
    assert out.startswith("Part ")
    assert out.endswith(" of the tale.\n")
    code, out, _ = oelm("show", "tale")
    assert "documents in two splits: val and train 0, test and train 0, val and test 0" in out
    assert sum(int(line.split()[3]) for line in out.splitlines() if "█" in line) > 100
    code, out, _ = oelm("show", "tale", "--json")
    assert json.loads(out)["duplicates"] == {
        "val and train": 0,
        "test and train": 0,
        "val and test": 0,
    }
    code, out, _ = oelm("show", "tale", "--check")
    assert (code, len(out.splitlines())) == (0, 4)


def test_a_damaged_dataset_is_one_line_and_listed_as_such(oelm, text, home):
    oelm("prepare", text, "--tokenizer", "bytes")
    data = bytearray((home / "tale-bytes" / "train.bin").read_bytes())
    data[0] ^= 1
    (home / "tale-bytes" / "train.bin").write_bytes(data)
    code, out, err = oelm("show", "tale-bytes", "--check")
    assert code == 2
    assert "train.bin: altered since it was written" in err
    assert err.count("\n") == 1
    (home / "tale-bytes" / "train.bin").write_bytes(data[:-2])
    code, out, err = oelm("list")
    assert (code, err) == (0, "")
    assert "tale-bytes  unusable: " in out
    assert oelm("show", "tale-bytes")[0] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prepare"], "which corpus? Name one of sotu, tinystories"),
        (["prepare", "stou"], "unknown corpus, and no file, 'stou'; did you mean 'sotu'?"),
        (["prepare", "sotu", "tinystories"], "sotu is prepared by itself"),
        (["prepare", "none/x.txt"], "no file or folder at none/x.txt"),
        (["prepare", "sotu", "--source", "."], "--source is for a corpus from the hub"),
        (["prepare", "sotu", "--tokeniser", "gpt2"], "did you mean '--tokenizer'?"),
        (["prepare", "sotu", "--tokenizer", "bpe:1"], "write bpe:N with N from 257"),
        (["prepare", "sotu", "--max_docs", "many"], "see `oelm data prepare --help`"),
        (["show", "nothing"], "no dataset 'nothing'"),
        (["shwo"], "unknown action of oelm data 'shwo'; did you mean 'show'?"),
    ],
)
def test_mistakes_are_one_line(oelm, argv, message):
    code, out, err = oelm(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("oelm: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["--help"], ["prepare", "--help"], ["list", "--help"], ["show", "--help"], []]
)
def test_help(oelm, argv):
    code, out, err = oelm(*argv)
    assert (code, err) == (0, "")
    assert "usage: oelm data" in out
