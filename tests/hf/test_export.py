import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oelm.data.dataset import Dataset
from oelm.errors import UserError
from oelm.hf import export
from oelm.train.saved import SavedRun

PROMPT = "the years of the"


@pytest.fixture(scope="session")
def exported(finished_run, tmp_path_factory):
    return export(finished_run, tmp_path_factory.mktemp("export") / "model")


@pytest.fixture(scope="session")
def ours(finished_run):
    saved = SavedRun(finished_run)
    model = saved.build()
    model.load_state_dict(saved.weights())
    return model.eval()


def test_the_folder_holds_what_others_expect(exported):
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "oelm"
    assert config["architectures"] == ["OelmForCausalLM"]
    assert config["method"]["name"] == "oelm_v2"


def test_logits_are_the_same(exported, ours):
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokens = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=0)


def test_greedy_text_is_the_same(exported, ours, tiny_dataset):
    tokenizer = Dataset.open(tiny_dataset).tokenizer()
    ids = tokenizer.encode(PROMPT)
    expected = [int(token) for token in ours.generate(torch.tensor([ids]), 40, temperature=0)]

    model, auto = (
        AutoModelForCausalLM.from_pretrained(exported),
        AutoTokenizer.from_pretrained(exported),
    )
    given = auto(PROMPT, return_tensors="pt")
    assert given["input_ids"][0].tolist() == ids
    found = model.generate(**given, max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
    assert found == expected
    assert auto.decode(found) == tokenizer.decode(expected)


def test_the_card_states_the_run_s_numbers(exported, finished_run):
    card = (exported / "README.md").read_text()
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    for split in ("val", "test"):
        (row,) = [x for x in lines if x["kind"] == "eval" and x["full"] and x["split"] == split]
        assert f"| {split} | {row['loss']:.4f} | {row['ppl']:.3f} |" in card
    assert "4,096 were never trained" in card
    assert "Freeze audit: pass" in card


@pytest.mark.parametrize("state", ["running", "failed", "stopped", None])
def test_an_unfinished_run_is_refused(state, finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "state.json").unlink()
    if state:
        (run / "state.json").write_text(json.dumps({"state": state}))
    with pytest.raises(UserError, match=f"is not finished \\(it is {state or 'not started'}\\)"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(finished_run, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        export(finished_run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        export(tmp_path, tmp_path / "out")


TASK = """
task: recall
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [" seen", " zebra"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_lm_eval_reads_it(exported, tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"text": f"{word} to the years that we have"}) for word in "abcd")
    )
    (tmp_path / "recall.yaml").write_text(TASK.format(data=data))
    # In a process of its own: the harness has a command line, and the import comes first.
    script = (
        "import json, sys, oelm.hf, lm_eval\n"
        "from lm_eval.tasks import TaskManager\n"
        f"manager = TaskManager(include_path={str(tmp_path)!r}, include_defaults=False)\n"
        f"found = lm_eval.simple_evaluate(model='hf', model_args='pretrained={exported},device=cpu',"
        " tasks=['recall'], task_manager=manager, batch_size=2, bootstrap_iters=0)\n"
        "print(json.dumps(found['results']['recall']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["acc,none"] == 1.0
