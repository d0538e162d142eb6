import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from oelm.data.labelled import Row
from oelm.errors import UserError
from oelm.hf.classifier import Checkpoint, HubEncoding
from oelm.methods import method
from oelm.train.classification import ClassificationTask
from oelm.train.config import TrainConfig
from oelm.train.loop import train

SCRATCH = (
    "hf:bert,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,"
    "max_length=32"
)
SEEDS = {"init_seed": 0, "data_seed": 0, "frozen_seed": 0}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "plot", *map(str, range(10))]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder as `bert-base-uncased` is one, but small: model and tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=len(WORDS), max_position_embeddings=40,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """Two texts; whether their first words agree is the class."""
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))
    file = tmp_path / "pairs.tsv"
    words = ("good", "bad")
    rows = [
        f"{words[i % 2]} film {i % 10}\t{words[i // 2 % 2]} plot {'film ' * (i % 5)}\t"
        f"{'same' if i % 2 == i // 2 % 2 else 'other'}"
        for i in range(200)
    ]
    file.write_text("a\tb\tgold\n" + "\n".join(rows) + "\n")
    return f"{file},text=a+b,label=gold,val={file},test={file}"


def config(model, dataset, out, **changes):
    given = {
        "task": "classification", "method": "oelm_v2", "model": model, "dataset": dataset,
        "out_dir": out, "max_steps": 8, "batch_size": 16, "max_lr": 1e-3, "warmup": 2,
        "eval_interval": 4, "save_interval": 4, "threads": 1, "device": "cpu", "precision": "fp32",
    }  # fmt: skip
    return TrainConfig(**{**given, **changes})


@pytest.mark.parametrize("kind", ["pretrained", "architecture"])
def test_a_converted_model_trains_in_our_loop(kind, bert, pairs, tmp_path):
    model = f"hf:{bert},max_length=24" if kind == "pretrained" else SCRATCH
    folder = train(config(model, pairs, tmp_path / "run"))
    audit = json.loads((folder / "freeze_audit.json").read_text())
    assert audit["verdict"] == "pass"
    assert audit["frozen"] == 2 * 2 * (32 * 32 + 32)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["full"]
    assert lines[-1]["rows"] == 200


def test_pretrained_weights_are_loaded_and_the_head_is_drawn_from_the_seed(bert):
    found = Checkpoint.parse(str(bert))
    seeds = {**SEEDS, "init_seed": 5}
    chosen = method("oelm_v2,qk.init=keep")
    first, again = (found.build(chosen, ["a", "b", "c"], 18, 0, seeds, 0.2) for _ in range(2))
    original = transformers.BertModel.from_pretrained(bert, add_pooling_layer=False)
    for name, value in original.state_dict().items():
        assert torch.equal(first.state_dict()[f"model.bert.{name}"], value), name
    head = "model.classifier.weight"
    assert first.state_dict()[head].shape == (3, 32)
    assert torch.equal(first.state_dict()[head], again.state_dict()[head])
    assert first.model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert {m.p for m in first.modules() if isinstance(m, torch.nn.Dropout)} == {0.2}


def test_pairs_reach_bert_with_its_token_types(bert, pairs, tmp_path):
    task = ClassificationTask(config(f"hf:{bert},max_length=24", pairs, tmp_path / "run"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    examples = task.dataset.examples("val")
    tokens, parts, _ = examples.batch(torch.tensor([0, 3]).numpy(), task.dataset.pad)
    texts = ("good film 0", "bad film 3"), ("good plot ", "bad plot film film film ")
    expected = tokenizer(*map(list, texts), padding=True, return_tensors="pt")
    assert torch.equal(torch.from_numpy(tokens), expected["input_ids"])
    model = task.build().eval()
    plain = model.model(**expected).logits
    torch.testing.assert_close(model(torch.from_numpy(tokens), torch.from_numpy(parts)), plain)


@pytest.mark.parametrize("name", ["roberta", "distilbert", "gpt2", "llama"])
def test_architectures_to_start_anew(name, pairs, tmp_path):
    shapes = {
        "distilbert": "dim=32,n_layers=1,n_heads=2,hidden_dim=64",
        "gpt2": "n_embd=32,n_layer=1,n_head=2",
    }
    usual = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
    spec = f"hf:{name},{shapes.get(name, usual)},max_length=24"
    task = ClassificationTask(config(spec, f"{pairs},tokenizer=bytes", tmp_path / "run"))
    model = task.build()
    tokens, parts, labels = task.train.batch(task.buckets.rows(0), task.pad)
    assert task.dataset.pad in tokens[parts > 0]  # our texts end in it, so padding is another
    assert set(tokens[parts == 0]) <= {task.pad} == {model.model.config.pad_token_id}
    arrays = (torch.from_numpy(array) for array in (tokens, parts, labels))
    loss = model(*arrays)
    loss.backward()
    assert loss.item() == pytest.approx(0.69, abs=0.2)
    assert len(model.model.oelm.frozen) in (2, 4)


def test_long_texts_are_cut_by_the_tokenizer_and_counted(bert):
    encoding = HubEncoding(Checkpoint.parse(f"{bert},max_length=8"))
    ids, second, cut = encoding.encode(Row(("good film 1", "bad plot 2 3 4 5"), "x", ""))
    assert len(ids) == 8
    assert cut
    assert second < 8
    assert encoding.encode(Row(("good film",), "x", "")) == ([2, 4, 6, 3], 4, False)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("/nowhere/at/all", "cannot load hf:/nowhere/at/all"),
        ("BERT,hidden_size=64", "pretrained, so hidden_size cannot be changed"),
        ("PATH,max_length=41", "max_length must be 8 to 40, not 41"),
        ("PATH,max_length=long", "max_length must be a number, not 'long'"),
        ("bert,hiden_size=64", "unknown field of hf:bert 'hiden_size'; did you mean 'hidden_size'"),
    ],
)
def test_checkpoints_that_cannot_be_used(spec, match, bert, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = spec.replace("PATH", str(bert)).replace("BERT", str(bert))
    with pytest.raises(UserError, match=match):
        HubEncoding(Checkpoint.parse(spec))
