import json
import os

import pytest
import yaml

from oelm.errors import UserError
from oelm.train.errors import StoppedError
from oelm.train.record import Record, _compare, environment


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder):
    return json.loads((folder / "state.json").read_text())


@pytest.fixture
def config(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    return tiny()


def test_the_state_follows_the_run(config):
    with Record(config) as record:
        assert state(config.out_dir)["state"] == "running"
        record.update(5, loss=2.0)
        record.beat()
        now = state(config.out_dir)
        assert (now["step"], now["max_steps"], now["pid"]) == (5, 12, os.getpid())
        assert now["last"] == {"loss": 2.0}
    assert state(config.out_dir)["state"] == "finished"
    assert record.finished()

    with pytest.raises(StoppedError), Record(config):
        raise StoppedError
    assert state(config.out_dir)["state"] == "stopped"
    with pytest.raises(ValueError, match="boom"), Record(config):
        raise ValueError("boom")
    failed = state(config.out_dir)
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: boom")
    assert failed["attempt"] == 3


def test_an_engine_says_where_the_run_is(config, monkeypatch):
    monkeypatch.setenv("OELM_WHERE", "local slot 1")
    (config.out_dir / "state.json").write_text('{"state": "waiting"}')
    with Record(config):
        assert state(config.out_dir)["where"] == "local slot 1"
        assert state(config.out_dir)["attempt"] == 1


def test_rewinding_drops_what_will_be_written_again(config):
    with Record(config) as record:
        for step in (1, 2, 3):
            record.metrics("train", step, loss=float(step))
        record.metrics("eval", 2, full=True)
    with (config.out_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2, "lo')  # killed in the middle of a line
    with Record(config) as record:
        record.rewind(2)
        record.metrics("train", 3, loss=9.0)
    assert [(line["step"], line["loss"]) for line in lines(config.out_dir)] == [
        (1, 1.0), (2, 2.0), (3, 9.0),
    ]  # fmt: skip


def test_lines_wait_while_they_cannot_be_written(config, caplog):
    path = config.out_dir / "metrics.jsonl"
    with Record(config) as record:
        record.metrics("train", 1)
        path.rename(path.with_suffix(".away"))
        path.mkdir()  # in the way, as a full disk would be
        record.metrics("train", 2)
        assert "its lines wait" in caplog.text
        path.rmdir()
        path.with_suffix(".away").rename(path)
        record.metrics("train", 3)
    assert [line["step"] for line in lines(config.out_dir)] == [1, 2, 3]


def test_a_folder_holds_one_run_and_says_how_another_differs(tiny, config):
    resolved = {"method": {"q": {"init": "headwise"}}, "seeds": {"init_seed": 0}}
    Record(config).config(resolved)
    stored = yaml.safe_load((config.out_dir / "config.yaml").read_text())
    assert stored["schema"] == 1
    assert stored["max_lr"] == config.max_lr
    assert stored["resolved"] == resolved
    Record(tiny(threads=2, save_interval=9, keep=1)).config(resolved)
    with pytest.raises(UserError, match=r"a run with max_lr 0\.003, not 0\.1; choose another"):
        Record(tiny(max_lr=0.1)).config(resolved)
    other = {"method": {"q": {"init": "normal"}}, "seeds": {"init_seed": 0}}
    with pytest.raises(UserError, match=r"resolved\.method\.q\.init 'headwise', not 'normal'"):
        Record(config).config(other)


def test_a_dataset_may_have_moved(config):
    about = {"name": "sotu", "sha256": "a" * 8, "path": "/here/sotu"}
    Record(config).config({"method": {}, "dataset": about})
    Record(config).config({"method": {}, "dataset": about | {"path": "/there/sotu"}})
    with pytest.raises(UserError, match=r"resolved\.dataset\.sha256"):
        Record(config).config({"method": {}, "dataset": about | {"sha256": "b" * 8}})


def test_a_finished_run_keeps_its_configuration(tiny, config):
    with Record(config) as record:
        record.config({"method": {}})
    Record(tiny(test=True)).config({"method": {}})
    assert yaml.safe_load((config.out_dir / "config.yaml").read_text())["test"] is False


def test_ranks_other_than_0_write_nothing(config):
    with Record(config, writes=False) as record:
        record.metrics("train", 1)
        record.json("x.json", {})
        record.update(1)
        record.beat()
        record.config({})
    assert list(config.out_dir.iterdir()) == []


def test_the_environment_names_code_and_packages():
    about = environment("cpu", "fp32", 1, 2)
    assert {"torch", "numpy"} <= about["packages"].keys()
    assert about["code"] is None or len(about["code"].rstrip("+")) == 40
    assert (about["threads"], about["processes"]) == (1, 2)


def test_a_run_of_an_older_version_is_continued_and_another_run_is_refused(tmp_path):
    old = {"method": {"name": "oelm_v2", "temperature": False, "dropped": 1}}
    new = {"method": {"name": "oelm_v2", "temperature": False, "added": False}}
    _compare({"resolved": old}, {"resolved": new}, tmp_path)
    new["method"]["temperature"] = True
    with pytest.raises(UserError, match=r"resolved\.method\.temperature False, not True"):
        _compare({"resolved": old}, {"resolved": new}, tmp_path)
