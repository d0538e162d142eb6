import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.cli import main
from oelm.cli.generate import generate, pieces
from oelm.data.tokenizers import Bytes
from oelm.errors import UserError
from oelm.train.config import TrainConfig
from oelm.train.loop import train
from oelm.train.saved import SavedRun


@pytest.fixture(scope="module")
def run(tiny_dataset, tmp_path_factory):
    return train(
        TrainConfig(
            method="oelm_v2",
            model="nano,n_layers=1,d_model=32,n_heads=2,d_ff=64,seq_len=32",
            dataset=str(tiny_dataset),
            out_dir=tmp_path_factory.mktemp("runs") / "run",
            max_steps=4,
            batch_size=8,
            max_lr=3e-3,
            warmup=1,
            eval_interval=2,
            threads=1,
            device="cpu",
        )
    )


def test_greedy_text_is_that_of_the_uncached_computation(run, capsys):
    assert (
        generate([str(run), "--prompt", "the of", "--temperature", "0", "--max-new-tokens", "20"])
        == 0
    )
    saved = SavedRun(run)
    model = saved.language_model()
    model.load_state_dict(saved.weights())
    ids = torch.tensor([list(b"the of")])
    for _ in range(20):
        with torch.no_grad():
            ids = torch.cat([ids, model.eval()(ids)[:, -1:].argmax(-1)], dim=1)
    assert capsys.readouterr().out == Bytes().decode(ids[0].tolist()) + "\n"


def test_the_seed_decides_and_the_window_may_be_outgrown(run, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        generate([str(run), "--prompt", "a", "--seed", seed, "--max_new_tokens", "60"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    generate([str(run), "--max_new_tokens", "3", "--top-k", "None", "--top-p", "0.9"])
    assert capsys.readouterr().out


@given(st.text())
def test_a_stream_never_shows_half_a_character(text):
    tokenizer = Bytes()
    shown = list(pieces([*tokenizer.encode(text), tokenizer.eot, 65], tokenizer))
    assert "".join(shown) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in shown)


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    assert list(pieces([65, 0xE2, 0x82], Bytes())) == ["A", "\ufffd"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--temperature", "-1"], r"temperature cannot be -1\.0"),
        (["--top-p", "1.5"], r"top_p cannot be 1\.5"),
        (["--top-k", "0"], "top_k cannot be 0"),
        (["--max-new-tokens", "0"], "max_new_tokens cannot be 0"),
    ],
)
def test_impossible_options_are_refused(run, options, problem):
    with pytest.raises(UserError, match=problem):
        generate([str(run), *options])


def test_what_is_no_run_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(tmp_path)])
    assert stop.value.code == 2
    assert "is no run folder" in capsys.readouterr().err
