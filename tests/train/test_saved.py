"""The audit of a run's checkpoint: clean it passes, and each fault of a file flips the verdict."""

import pytest
import yaml

from oelm.errors import UserError
from oelm.train import checkpoint
from oelm.train.loop import train
from oelm.train.saved import audit_checkpoint

Q = "blocks.0.attention.q.weight"


@pytest.fixture
def run(tiny):
    return train(tiny())


def rewrite(path, change):
    content = checkpoint.read(path)
    change(content["model"])
    checkpoint.write(content, path)


def test_a_clean_run_passes_by_folder_and_by_file(run):
    for path in (run, run / "best.pt", run / "last.pt"):
        result = audit_checkpoint(path)
        assert result["problems"] == []
        assert result["verdict"] == "pass"


def test_a_frozen_matrix_that_was_overwritten_fails(run):
    rewrite(run / "best.pt", lambda model: model[Q].mul_(1.01))
    result = audit_checkpoint(run)
    assert result["verdict"] == "fail"
    assert result["problems"] == [
        f"{Q} does not hold the value that its seed gives: it was overwritten"
    ]


def test_a_checkpoint_of_another_model_fails(run):
    rewrite(run / "best.pt", lambda model: model.pop(Q))
    assert f"{Q} is missing from the checkpoint" in audit_checkpoint(run)["problems"]


def test_a_configuration_other_than_the_runs_fails(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["resolved"]["model"]["d_ff"] += 8
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    problems = audit_checkpoint(run)["problems"]
    assert any("mlp.up.weight is" in p and "the configuration says" in p for p in problems)


def test_what_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(UserError, match="there is nothing at"):
        audit_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no run folder"):
        audit_checkpoint(tmp_path)
    (run / "best.pt").write_bytes((run / "best.pt").read_bytes()[:-100])
    with pytest.raises(UserError, match="SHA-256"):
        audit_checkpoint(run)
