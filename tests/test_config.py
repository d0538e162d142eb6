from dataclasses import dataclass
from typing import Literal

import pytest

from oelm.config import from_mapping, load_yaml, split_spec, to_mapping
from oelm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    rate: float = 0.1
    name: str = "a"
    kind: Literal["x", "y"] = "x"
    layers: tuple[int, ...] = ()
    limit: int | None = None
    inner: Inner = Inner()
    flag: bool = False


def test_a_spec_is_a_name_and_what_differs():
    assert split_spec("nano,positions=rope,q.rank=4,lr=1e-3,layers=[0, 2]") == (
        "nano",
        {"positions": "rope", "q": {"rank": 4}, "lr": 0.001, "layers": [0, 2]},
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nano,positions", "cannot read 'positions' in"),
        ("nano,positions={", r"cannot read '\{' in"),
        ("baseline,lr_by_layer=[1,2", "cannot read"),
        ("oelm_v2,q=1,q.rank=4", "gives q a value and fields"),
    ],
)
def test_a_spec_that_cannot_be_read(spec, message):
    with pytest.raises(UserError, match=message):
        split_spec(spec)


def test_mappings_round_trip():
    sample = Sample(rate=2.0, layers=(1, 2), inner=Inner(depth=3))
    assert from_mapping(Sample, to_mapping(sample), what="sample") == sample


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rat": 1}, "unknown field of sample 'rat'; did you mean 'rate'?"),
        ({"kind": "z"}, "unknown value for sample: kind 'z'; choose from: x, y"),
        ({"rate": "fast"}, "sample: rate must be float, not 'fast'"),
        ({"limit": 1.5}, "sample: limit must be int, not 1.5"),
        ({"flag": "yes"}, "sample: flag must be bool, not 'yes'"),
        ({"inner": {"dept": 1}}, "unknown field of sample: inner 'dept'; did you mean 'depth'?"),
    ],
)
def test_a_wrong_mapping_is_refused_by_name(data, message):
    with pytest.raises(UserError) as error:
        from_mapping(Sample, data, what="sample")
    assert str(error.value) == message


def test_numbers_are_read_as_people_write_them():
    assert from_mapping(Sample, {"rate": "3e-4", "limit": 1e3}, what="s") == Sample(
        rate=3e-4, limit=1000
    )


def test_yaml_must_be_a_readable_mapping(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(UserError, match="mapping"):
        load_yaml(path)
    path.write_text("a: [1\n")
    with pytest.raises(UserError, match="not readable as YAML"):
        load_yaml(path)
    with pytest.raises(UserError, match="no file"):
        load_yaml(tmp_path / "b.yaml")
