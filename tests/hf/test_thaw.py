"""Converted models under the trainers of others: the plain Trainer, its callback that thaws, and PEFT."""

from pathlib import Path

import pytest
import torch
import transformers

import oelm.hf
from oelm.freezing import hashes
from tests.hf.models import build, logits, train


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(2, 10) + i, "labels": torch.tensor(i % 2)}


@pytest.mark.parametrize("reloaded", [False, True])
def test_the_plain_trainer_trains_it(reloaded, tmp_path):
    model = oelm.hf.convert(build("bert"), "oelm_v2")
    if reloaded:
        model.save_pretrained(tmp_path / "model")
        model = type(model).from_pretrained(tmp_path / "model")
    first = hashes(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=20, per_device_train_batch_size=4,
        learning_rate=1e-2, weight_decay=0.1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Pairs())
    trainer.train()
    last = hashes(model)
    assert {n for n in first if first[n] == last[n]} == set(model.oelm.frozen)
    assert oelm.hf.audit(model)["verdict"] == "pass"
    trainer.save_model(str(tmp_path / "saved"))
    assert hashes(type(model).from_pretrained(tmp_path / "saved")) == last


class Watch(transformers.TrainerCallback):
    """Which steps moved the first query."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.moved = weight, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.before = self.weight.clone()

    def on_step_end(self, args, state, control, **kwargs):
        if not torch.equal(self.before, self.weight):
            self.moved.append(state.global_step - 1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("oelm_thaw", [5, 6, 7, 8, 9]),
        ("oelm_v2,qk.trains=every,qk.every=4", [0, 4, 8]),
        ("oelm_no_freeze", list(range(10))),
    ],
)
def test_thawing_under_the_trainer(spec, expected, tmp_path):
    model = oelm.hf.convert(build("bert"), spec)
    watch = Watch(model.bert.encoder.layer[0].attention.self.query.weight)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2,
        weight_decay=0.1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callbacks = [oelm.hf.Thaw(), watch]
    transformers.Trainer(
        model=model, args=arguments, train_dataset=Pairs(), callbacks=callbacks
    ).train()
    assert watch.moved == expected


@pytest.mark.parametrize(
    ("name", "target"), [("gpt2", "v"), ("llama", "v_proj"), ("bert", "value")]
)
def test_peft_puts_lora_on_v(name, target, tmp_path: Path):
    peft = pytest.importorskip("peft")
    model = oelm.hf.convert(build(name), "oelm_v2")
    frozen = dict(model.oelm.frozen)
    kind = "SEQ_CLS" if name == "bert" else "CAUSAL_LM"
    config = peft.LoraConfig(r=2, target_modules=[target], task_type=kind)
    wrapped = peft.get_peft_model(model, config)
    first = hashes(wrapped)
    train(wrapped, name)
    last = hashes(wrapped)
    moved = {n for n in first if first[n] != last[n]}
    assert moved
    assert all("lora_" in n or "classifier" in n for n in moved)
    assert sum("lora_" in n for n in moved) == 4
    for n, value in frozen.items():
        assert last[f"base_model.model.{n}"] == value
    wrapped.save_pretrained(tmp_path)
    base = oelm.hf.convert(build(name), "oelm_v2")
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits(again, name), logits(wrapped, name), atol=1e-6, rtol=1e-5)
