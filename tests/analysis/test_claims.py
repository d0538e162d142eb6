import pytest

from oelm.analysis.claims import Claim, Margin, parse_claims
from oelm.errors import UserError


def parse(**fields: object) -> Claim:
    return parse_claims({"c": fields}, ["A", "B"])[0]


def test_the_kinds_are_read():
    claim = parse(metric="ppl", arm="A", vs="B", at_most="+5%", text="close")
    assert (claim.kind, claim.margin, claim.arms) == ("at_most", Margin(0.05, True), ("A", "B"))
    assert parse(metric="accuracy", arm="A", vs="B", at_least="-1pt").margin == Margin(-1, False)
    assert parse(metric="ppl", arm="A", vs="B", equivalent_within="5 %").margin.value == 0.05
    assert parse(metric="steps_per_hour", arm="A", vs="B", greater=True).margin.value == 0
    assert parse(metric="frozen", arm="A", min=3_000_000).bound == 3e6
    assert parse(metric="time_to_ppl:30", arm="A", vs="B", less=True).measured.unit == "s"
    assert parse(metric="probe:copy", arm="A", max=0.5).kind == "max"
    assert parse_claims(None, ["A"]) == ()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"metric": "pl", "arm": "A", "min": 1}, "did you mean 'ppl'"),
        ({"metric": "ppl", "arm": "C", "min": 1}, "unknown arm in claim 'c' 'C'"),
        ({"metric": "ppl", "arm": "A"}, "gives none; write exactly one of"),
        ({"metric": "ppl", "arm": "A", "min": 1, "max": 2}, "gives min and max"),
        ({"metric": "ppl", "arm": "A", "at_most": "+5%"}, "needs `vs`"),
        ({"metric": "ppl", "arm": "A", "vs": "B", "at_most": 5}, "write '+5%' or '+1pt'"),
        ({"metric": "ppl", "arm": "A", "vs": "B", "at_most": "-100%"}, "leaves nothing"),
        ({"metric": "ppl", "arm": "A", "vs": "A", "less": True}, "with itself"),
        ({"metric": "ppl", "arm": "A", "vs": "B", "min": 3}, "drop `vs`"),
        ({"metric": "ppl", "arm": "A", "vs": "B", "equivalent_within": "0%"}, "above 0"),
        ({"metric": "ppl", "arm": "A", "vs": "B", "atmost": "5%"}, "did you mean 'at_most'"),
        ({"metric": "time_to_ppl:x", "arm": "A", "max": 1}, "above 1"),
        ({"metric": "ppl", "arm": "A", "min": "nan"}, "finite"),
        ({"arm": "A", "min": 1}, "metric"),
    ],
)
def test_a_wrong_claim_is_refused_with_the_reason(fields, says):
    with pytest.raises(UserError, match=says.replace("+", r"\+")):
        parse(**fields)


def test_claims_must_be_a_mapping():
    with pytest.raises(UserError, match="mapping of names"):
        parse_claims(["x"], ["A"])
    with pytest.raises(UserError, match="must be a mapping with"):
        parse_claims({"c": "ppl below 3"}, ["A"])
