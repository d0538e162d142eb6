import gc
import json
import math
import os
import signal

import pytest
import torch
import yaml

from oelm.errors import UserError
from oelm.model.gpt import GPT
from oelm.train import checkpoint
from oelm.train.errors import InUseError, NonFiniteError, StoppedError
from oelm.train.lock import FolderLock
from oelm.train.loop import Trainer, train
from oelm.train.task import LanguageTask
from tests.train.runs import assert_same_run, at_step, crash, metrics


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def test_probes_are_recorded_at_each_evaluation(tiny):
    probed, plain = tiny("probed", probes=("induction", "attention")), tiny("plain")
    lines = [line for line in metrics(train(probed)) if line["kind"] == "probe"]
    names = {"induction_accuracy", "induction_gain"}
    names |= {
        f"{what}_{layer}" for what in ("attention_entropy", "logit_std") for layer in range(2)
    }
    assert {(line["step"], line["name"]) for line in lines} == {
        (s, n) for s in (6, 12) for n in names
    }
    assert all(math.isfinite(line["value"]) for line in lines)
    # They look and do not touch.
    weights = [checkpoint.read(train(c) / "last.pt")["model"] for c in (probed, plain)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_folder_explains_itself(tiny, tiny_dataset):
    config = tiny(test=True, log_interval=5)
    folder = train(config)
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml", "metrics.jsonl", "training.log", "timing_stats.json", "freeze_audit.json",
        "environment.json", "state.json", "samples.json", "best.pt", "last.pt", "last.prev.pt",
    }  # fmt: skip
    lines = metrics(folder, timed=True)
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [5, 10, 12]
    assert [line["tokens"] for line in trained] == [5 * 256, 10 * 256, 12 * 256]
    assert trained[-1]["lr"] == pytest.approx(3e-4)
    assert trained[0]["loss"] == pytest.approx(math.log(257), abs=0.5)
    evaluated = [line for line in lines if line["kind"] == "eval"]
    assert [(e["step"], e["split"], e["full"], e["tokens"]) for e in evaluated] == [
        (6, "val", False, 300),
        (12, "val", False, 300),
        (12, "val", True, splits(tiny_dataset)["val"]["tokens"] - 1),
        (12, "test", True, splits(tiny_dataset)["test"]["tokens"] - 1),
    ]
    val = evaluated[2]
    assert val["ppl"] == pytest.approx(math.exp(val["loss"]))
    about = splits(tiny_dataset)["val"]
    bits = val["loss"] / math.log(2) * about["tokens"] / about["bytes"]
    assert val["bpb"] == pytest.approx(bits)

    timing = json.loads((folder / "timing_stats.json").read_text())
    assert timing["model_type"] == "oelm_v2"
    assert timing["init_method"] == "headwise"
    assert timing["final_perplexity"] == val["ppl"]
    assert timing["best_perplexity"] == pytest.approx(min(e["ppl"] for e in evaluated[:2]))
    assert timing["checkpoint_bytes"] == (folder / "last.pt").stat().st_size
    assert 0 < timing["median_step_time"] <= timing["p95_step_time"]
    assert 0 < timing["matmul_share"] < 1.5
    assert timing["total_wall_time"] > timing["train_time"] > 0
    state = json.loads((folder / "state.json").read_text())
    assert (state["state"], state["step"]) == ("finished", 12)
    proof = json.loads((folder / "freeze_audit.json").read_text())
    assert (proof["verdict"], proof["frozen"]) == ("pass", 2 * 2 * 32 * 32)
    assert all(row["moved"] == (row["role"] == "trained") for row in proof["tensors"])
    samples = json.loads((folder / "samples.json").read_text())
    assert len(samples) == 3
    assert all(sample["prompt"] for sample in samples)
    resolved = yaml.safe_load((folder / "config.yaml").read_text())["resolved"]
    assert resolved["seeds"] == {"init_seed": 0, "data_seed": 0, "frozen_seed": 0}
    assert resolved["model"]["vocab_size"] == 257
    assert resolved["method"]["q"]["init"] == "headwise"


def splits(dataset):
    return json.loads((dataset / "meta.json").read_text())["splits"]


def test_training_leaves_the_garbage_collector_as_it_was(tiny):
    frozen = gc.get_freeze_count()
    train(tiny())
    assert gc.get_freeze_count() == frozen


def test_best_pt_holds_the_weights_of_the_best_evaluation_only(tiny):
    folder = train(tiny())
    best = checkpoint.read(folder / "best.pt")
    evaluated = [e for e in metrics(folder) if e["kind"] == "eval" and not e["full"]]
    assert best["val_loss"] == min(e["loss"] for e in evaluated)
    assert best.keys() == {"schema", "step", "val_loss", "model"}
    task = LanguageTask(tiny())
    model = task.build()
    model.load_state_dict(best["model"])


@pytest.mark.parametrize("method", ["oelm_v2", "oelm_thaw", "oelm_v2,qk.trains=every,qk.every=3"])
@pytest.mark.parametrize("event", [crash, stop], ids=["crash", "SIGTERM"])
def test_an_interrupted_run_continues_bit_for_bit(tiny, monkeypatch, method, event):
    whole = train(tiny("whole", method=method, thaw_warmup=2))
    for step in (5, 10):
        with monkeypatch.context() as patch:
            at_step(patch, step, event)
            with pytest.raises((MemoryError, StoppedError)):
                train(tiny("cut", method=method, thaw_warmup=2))
    cut = train(tiny("cut", method=method, thaw_warmup=2))
    assert_same_run(whole, cut)
    assert "continuing from step" in (cut / "training.log").read_text()


def test_a_signal_saves_where_it_came(tiny, monkeypatch):
    at_step(monkeypatch, 5, stop)
    with pytest.raises(StoppedError, match="stopped by SIGTERM at step 5, and saved"):
        train(tiny())
    folder = tiny().out_dir
    assert checkpoint.read(folder / "last.pt")["step"] == 5
    assert json.loads((folder / "state.json").read_text())["state"] == "stopped"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_killed_while_finishing_is_finished_without_training_again(tiny, monkeypatch):
    whole = train(tiny("whole"))
    with monkeypatch.context() as patch:
        patch.setattr("oelm.train.loop.write_summaries", lambda *args: crash())
        with pytest.raises(MemoryError):
            train(tiny("cut"))
        assert metrics(tiny("cut").out_dir)[-1]["full"]
    monkeypatch.setattr(Trainer, "step", lambda self, batch: crash())
    assert_same_run(whole, train(tiny("cut")))
    modified = (tiny("cut").out_dir / "last.pt").stat().st_mtime_ns
    train(tiny("cut"))  # finished: nothing is touched
    assert (tiny("cut").out_dir / "last.pt").stat().st_mtime_ns == modified


def test_a_truncated_last_checkpoint_costs_steps_but_not_the_run(tiny, monkeypatch):
    whole = train(tiny("whole"))
    with monkeypatch.context() as patch:
        at_step(patch, 10, crash)
        with pytest.raises(MemoryError):
            train(tiny("cut"))
    last = tiny("cut").out_dir / "last.pt"
    os.truncate(last, last.stat().st_size // 2)
    cut = train(tiny("cut"))
    assert_same_run(whole, cut)
    log = (cut / "training.log").read_text()
    assert "last.pt is cut or altered" in log
    assert "continuing from step 4" in log


def test_a_full_disk_costs_neither_the_run_nor_a_line(tiny, monkeypatch, small_disk, caplog):
    folder, clear, fill = small_disk
    settings = {"model": "nano,n_layers=1,d_model=16,n_heads=2,d_ff=32,seq_len=32"}
    whole = train(tiny("whole", **settings))
    at_step(monkeypatch, 5, fill)
    at_step(monkeypatch, 11, clear)
    cut = train(tiny(folder / "run", **settings))
    assert_same_run(whole, cut)
    assert "; training goes on" in caplog.text
    assert "after all" in caplog.text


def poison(monkeypatch, steps):
    """Make the gradient of some steps NaN, deep in a real model."""
    build = LanguageTask.build

    def poisoned(self):
        model = build(self)
        calls = iter(range(1000))
        model.final_norm.weight.register_hook(
            lambda grad: grad * float("nan") if next(calls) in steps else grad
        )
        return model

    monkeypatch.setattr(LanguageTask, "build", poisoned)


def test_a_nan_stops_the_run_names_the_step_and_keeps_the_good_checkpoint(tiny, monkeypatch):
    poison(monkeypatch, {6})
    with pytest.raises(NonFiniteError, match=r"step 7 is not finite.*data_seed=0\)\.batch\(6\)"):
        train(tiny())
    folder = tiny().out_dir
    last = checkpoint.read(folder / "last.pt")
    assert last["step"] == 4
    assert all(t.isfinite().all() for t in last["model"].values())
    assert json.loads((folder / "state.json").read_text())["state"] == "failed"


def test_a_few_bad_steps_can_be_allowed_and_change_nothing(tiny, monkeypatch):
    poison(monkeypatch, {4, 5, 6})
    with pytest.raises(NonFiniteError, match="3 such steps, 2 allowed"):
        train(tiny("two", skip_bad_steps=2))
    folder = train(tiny("three", skip_bad_steps=3, log_interval=1))
    content = checkpoint.read(folder / "last.pt")
    assert all(t.isfinite().all() for t in content["model"].values())
    assert content["optimizer"]["final_norm.weight"]["step"] == 9
    logged = [line["step"] for line in metrics(folder) if line["kind"] == "train"]
    assert logged == [1, 2, 3, 4, 8, 9, 10, 11, 12]


def test_a_huge_learning_rate_ends_in_the_same_refusal(tiny):
    with pytest.raises(NonFiniteError):
        train(tiny(max_lr=1e30, clip=0, warmup=0))


def test_two_trainers_in_one_folder(tiny):
    config = tiny()
    config.out_dir.mkdir()
    with FolderLock(config.out_dir), pytest.raises(InUseError, match=f"process {os.getpid()}"):
        train(config)
    assert not (config.out_dir / "state.json").exists()


def test_another_configuration_is_refused_and_spoils_nothing(tiny):
    folder = train(tiny())
    with pytest.raises(UserError, match=r"max_lr 0\.003, not 0\.001"):
        train(tiny(max_lr=1e-3))
    with pytest.raises(UserError, match="holds a run of oelm_v2, not of baseline"):
        train(tiny(method="baseline"))
    with pytest.raises(UserError, match="holds a run already"):
        train(tiny(resume=False))
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"


def test_frozen_matrices_are_checked_against_their_seed_on_load(tiny, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 10, crash)
        with pytest.raises(MemoryError):
            train(tiny())
    path = tiny().out_dir / "last.pt"
    content = checkpoint.read(path)
    content["model"]["blocks.0.attention.q.weight"][0, 0] += 1
    checkpoint.write(content, path)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attention\.q\.weight is frozen but moved"):
        train(tiny())


def test_accumulation_and_recomputation_change_nothing_but_rounding(tiny):
    one = metrics(train(tiny("one", dropout=0.0)))
    four = metrics(train(tiny("four", dropout=0.0, grad_accumulation=4)))
    again = metrics(train(tiny("again", dropout=0.0, activation_checkpointing=True)))
    for a, b, c in zip(one, four, again, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["loss"] == pytest.approx(c["loss"], rel=1e-5)


def test_evaluating_and_logging_do_not_disturb_training(tiny):
    seldom = train(tiny("seldom", eval_interval=12))
    often = train(tiny("often", eval_interval=1, log_interval=1, save_interval=1))
    one, two = (checkpoint.read(folder / "last.pt")["model"] for folder in (seldom, often))
    assert all(one[name].equal(two[name]) for name in one)


def test_arms_share_everything_that_their_methods_do_not_touch(tiny):
    a, b = (LanguageTask(tiny(method=m)).build() for m in ("baseline", "oelm_v2"))
    assert isinstance(a, GPT)
    theirs = dict(b.named_parameters())
    for name, parameter in a.named_parameters():
        if name in theirs:
            assert parameter.equal(theirs[name]), name


def test_thawed_parameters_start_their_adam_state_at_the_thaw(tiny):
    content = checkpoint.read(train(tiny(method="oelm_thaw")) / "last.pt")
    assert content["optimizer"]["blocks.0.attention.q.weight"]["step"] == 6
    assert content["optimizer"]["blocks.0.attention.v.weight"]["step"] == 12


def test_evaluation_is_sized_by_arithmetic(tiny):
    task = LanguageTask(tiny(eval_tokens=None, eval_interval=10))
    assert task.evaluation_tokens() == int(0.2 * 10 * 8 * 32)
    task = LanguageTask(tiny(eval_tokens=None, eval_interval=10**6))
    assert task.evaluation_tokens() == len(task.dataset.tokens("val")) - 1


@pytest.mark.slow
def test_bf16_trains_and_resumes_exactly(tiny, monkeypatch):
    # Very little work, for where the processor has no bf16 it emulates it a hundred times slower.
    small = "nano,n_layers=1,d_model=16,n_heads=2,d_ff=32,seq_len=16"
    settings = {
        "precision": "bf16",
        "max_steps": 4,
        "save_interval": 2,
        "batch_size": 2,
        "model": small,
    }
    whole = train(tiny("whole", **settings))
    with monkeypatch.context() as patch:
        at_step(patch, 3, crash)
        with pytest.raises(MemoryError):
            train(tiny("cut", **settings))
    assert_same_run(whole, train(tiny("cut", **settings)))
    assert json.loads((whole / "environment.json").read_text())["precision"] == "bf16"


def test_a_model_for_another_vocabulary_is_refused_before_a_folder_is_made(tiny):
    config = tiny(model="nano,vocab_size=100")
    with pytest.raises(UserError, match=r"vocabulary of 100 tokens.* has 257"):
        train(config)
    assert not config.out_dir.exists()


def test_tensorboard_gets_the_metrics_too(tiny):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = train(tiny(track=("tensorboard",)))
    events = reading.EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = [line["loss"] for line in metrics(folder) if line["kind"] == "train"]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses)


@pytest.mark.slow
def test_compiled_training_matches(tiny):
    plain = metrics(train(tiny("plain", dropout=0.0)))
    compiled = metrics(train(tiny("compiled", dropout=0.0, compile=True)))
    for a, b in zip(plain, compiled, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.gpu
def test_cuda_training_resumes_exactly_when_asked_to(tiny, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    settings = {"device": "cuda", "precision": "auto", "deterministic": True}
    whole = train(tiny("whole", **settings))
    with monkeypatch.context() as patch:
        at_step(patch, 7, crash)
        with pytest.raises(MemoryError):
            train(tiny("cut", **settings))
    assert_same_run(whole, train(tiny("cut", **settings)))
