import pytest

from oelm.errors import UserError
from oelm.train.config import TrainConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("log_interval", 0, "log_interval must be at least 1, not 0"),
        ("eval_tokens", 0, "eval_tokens must be at least 1, not 0"),
        ("threads", -1, "threads must be at least 1, not -1"),
        ("beta2", 1.5, "beta2 must be at least 0 and below 1, not 1.5"),
        ("weight_decay", -1.0, "weight_decay must not be negative, not -1.0"),
        ("warmup", -1, "warmup must not be negative, not -1"),
        ("max_lr", 0.0, "max_lr must be above 0, not 0.0"),
        ("max_memory", "lots", "max_memory must be a size such as 4GB, not 'lots'"),
        ("grad_accumulation", 3, "batch_size 8 is not divisible by grad_accumulation 3"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(field, value, message):
    with pytest.raises(UserError) as refused:
        TrainConfig(**{field: value})
    assert str(refused.value) == message


def test_warmup_is_in_steps_or_a_fraction():
    assert TrainConfig(warmup=0.1, max_steps=200).warmup_steps == 20
    assert TrainConfig(warmup=30, max_steps=200).warmup_steps == 30
    assert TrainConfig(max_lr=1e-3).last_lr == 1e-4
