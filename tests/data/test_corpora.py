import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oelm.data.corpora import CONVERTED, Sotu, articles, hub
from oelm.data.prepare import prepare
from oelm.errors import UserError

WIKI = [
    "", " = First = \n", "", " Some text . \n", " = = Section = = \n", " More = text . \n",
    "", " = Second = \n", "", " Other text . \n",
]  # fmt: skip
ARTICLES = [
    " = First = \n Some text . \n = = Section = = \n More = text . ",
    " = Second = \n Other text . ",
]


def stories(word: str, n: int) -> list[str]:
    return [f"{word} {number}: once upon a time." for number in range(n)]


def parquet(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path)


def test_sotu_is_whole_and_in_order():
    texts = list(Sotu().documents("train"))
    assert len(texts) == 249
    assert texts[0].startswith("Fellow-Citizens of the Senate and House of Representatives:")
    assert 11_900_000 < sum(len(text.encode()) for text in texts) < 12_600_000


def test_tinystories_from_a_copy_of_its_repository(tmp_path):
    """The hub's layout, through the same calls of `datasets`; only the path differs."""
    for number in range(2):
        part = tmp_path / "data" / f"train-0000{number}-of-00002-2d5a1467fff1081b.parquet"
        parquet(part, stories(f"train{number}", 300))
    parquet(
        tmp_path / "data" / "validation-00000-of-00001-869c898b519ad725.parquet", stories("val", 20)
    )
    corpus = hub("tinystories", tmp_path)
    assert list(corpus.documents("train")) == stories("train0", 300) + stories("train1", 300)
    dataset = prepare(corpus, "bytes")
    counts = {split: about["documents"] for split, about in dataset.meta["splits"].items()}
    assert counts["val"] == 20
    assert counts["train"] + counts["test"] == 600
    assert 1 <= counts["test"] <= 12
    assert (
        dataset.meta["split_rule"]
        == "official val; by hash of the document: test 0.005, train the rest"
    )
    assert dataset.meta["corpus"] == {
        "name": "tinystories",
        "repository": "roneneldan/TinyStories",
        "config": None,
        "source": str(tmp_path),
    }


@pytest.mark.parametrize("name", ["wikitext103", "wikitext2"])
def test_wikitext_gives_articles_and_its_own_splits(tmp_path, name):
    configs = ("wikitext-103-raw-v1", "wikitext-2-raw-v1")
    card = "---\nconfigs:\n"
    for config in configs:
        card += f"- config_name: {config}\n  data_files:\n"
        for split in ("train", "validation", "test"):
            parquet(
                tmp_path / config / f"{split}-00000-of-00001.parquet",
                [*WIKI, f" {split} {config}\n"],
            )
            card += f"  - split: {split}\n    path: {config}/{split}-*\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    dataset = prepare(hub(name, tmp_path), "bytes")
    config = configs[0] if name == "wikitext103" else configs[1]
    for split, official in {"train": "train", "val": "validation", "test": "test"}.items():
        texts = [dataset.tokenizer().decode(ids.tolist()) for ids in dataset.documents(split)]
        assert texts == [ARTICLES[0], f"{ARTICLES[1]}\n {official} {config}"]
    assert dataset.meta["split_rule"] == "official train, val, test"


def test_openwebtext_is_split_by_hash(tmp_path):
    parquet(tmp_path / "plain_text" / "train-00000-of-00001.parquet", stories("page", 2000))
    dataset = prepare(hub("openwebtext", tmp_path), "bytes")
    counts = {split: about["documents"] for split, about in dataset.meta["splits"].items()}
    assert sum(counts.values()) == 2000
    assert all(2 <= counts[split] <= 25 for split in ("val", "test"))


def test_articles_of_nothing():
    assert list(articles([])) == [""]
    assert [text for text in articles(WIKI) if text] == ARTICLES


def test_a_script_in_the_repository_is_one_line(tmp_path):
    """What newer `datasets` refuses; on the hub itself the converted branch would be tried next."""
    (tmp_path / f"{tmp_path.name}.py").write_text("")
    with pytest.raises(UserError, match=r"cannot read .* --source DIR") as caught:
        next(hub("openwebtext", tmp_path).documents("train"))
    assert "\n" not in str(caught.value)
    assert CONVERTED not in str(caught.value)


def test_a_copy_that_is_not_there(tmp_path):
    with pytest.raises(
        UserError, match=r"no folder at .*none; --source takes a local copy of roneneldan"
    ):
        hub("tinystories", tmp_path / "none")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (
        f"import sys; {code}; from oelm.cli import main; main(['data', 'prepare', 'tinystories'])"
    )
    return subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_no_network_is_one_line():
    done = run("pass", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot read roneneldan/TinyStories" in done.stderr
    assert (
        "without network, give a local copy with --source DIR, or prepare local files"
        in done.stderr
    )


def test_no_hub_extra_says_how_to_install_it():
    done = run("sys.modules['datasets'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "oelm: corpus 'tinystories' needs the hub extra: pip install 'oelm[hub]'; "
        "local files need none: oelm data prepare FILE\n"
    )
