import copy

import pytest
import torch
import transformers
from torch import nn

import oelm.hf
from oelm.errors import UserError
from oelm.freezing import count, hashes, roles, weights
from oelm.hf.convert import rebuild
from oelm.methods import method
from oelm.model.projection import Projection
from tests.hf.models import (
    ARCHITECTURES,
    GROUPED,
    NAMES,
    ORDINARY,
    build,
    logits,
    train,
)


def qk_rows(model: nn.Module) -> dict[str, torch.Tensor]:
    """Q/K (and V) of every attention, read off the original layouts by the definition of each."""
    found = {}
    for module_name, module in model.named_modules():
        if type(module).__name__ == "Conv1D" and module_name.endswith("c_attn"):
            for part, value in zip("qkv", module.weight.split(32, dim=1), strict=True):
                found[f"{module_name}.{part}"] = value.T
        elif module_name.endswith("query_key_value"):
            # GPT-NeoX reads `view(heads, 3 · width)` and then cuts it into three.
            by_head = module.weight.view(4, 3 * 8, 32)
            for i, part in enumerate("qkv"):
                found[f"{module_name}.{part}"] = by_head[:, 8 * i : 8 * i + 8].reshape(32, 32)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_keep_leaves_the_outputs_and_freezes_q_and_k_alone(name):
    model = build(name)
    before, original = logits(model, name), copy.deepcopy(model)
    total = count(model)["total"]
    assert oelm.hf.convert(model, "oelm_v2,qk.init=keep") is model
    torch.testing.assert_close(logits(model, name), before, atol=1e-6, rtol=1e-5)

    counts = count(model)
    assert counts["total"] == total
    assert counts["frozen"] == 2 * ARCHITECTURES[name][3]
    frozen = {n for n, role in roles(model).items() if role == "frozen"}
    for part, value in qk_rows(original).items():
        module = model.get_submodule(part)
        assert torch.equal(module.weight, value), part
        assert (f"{part}.weight" in frozen) == (part[-1] in "qk")

    first = hashes(model)
    optimizer = train(model, name)
    last = hashes(model)
    assert {n for n in first if first[n] == last[n]} == frozen
    assert oelm.hf.audit(model, optimizer)["verdict"] == "pass"


@pytest.mark.parametrize("name", NAMES)
def test_replacing_gives_orthonormal_heads_and_zero_biases(name):
    model = oelm.hf.convert(build(name), "oelm_v2", seed=3)
    projections = [m for m in model.modules() if isinstance(m, Projection)]
    assert len(projections) == (12 if name == "t5" else 4)
    for projection in projections:
        for head in projection.weight.chunk(projection.heads):
            torch.testing.assert_close(head @ head.T, torch.eye(8), atol=1e-6, rtol=0)
        assert projection.bias is None or not projection.bias.any()
    again = oelm.hf.convert(build(name), "oelm_v2", seed=3)
    assert hashes(again) == hashes(model)
    other = oelm.hf.convert(build(name), "oelm_v2", seed=3, frozen_seed=4)
    moved = {n for n, value in hashes(other).items() if value != hashes(model)[n]}
    assert moved == {n for n in model.oelm.frozen if n.endswith("weight")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", ["qk_ffn", "oelm_lowrank", "identity_lowrank", "oelm_k_only"])
def test_save_and_load_bring_the_treatment_back(name, spec, tmp_path):
    model = oelm.hf.convert(build(name), spec)
    train(model, name, steps=2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert hashes(loaded) == hashes(model)
    assert roles(loaded) == roles(model)
    assert loaded.oelm.method == method(spec)
    assert loaded.oelm.matched == model.oelm.matched
    torch.testing.assert_close(logits(loaded, name), logits(model, name), atol=0, rtol=0)
    train(loaded, name, steps=2)
    assert oelm.hf.audit(loaded)["verdict"] == "pass"


def test_auto_classes_load_it_too(tmp_path):
    model = oelm.hf.convert(build("gpt2"), "oelm_v2")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hashes(loaded) == hashes(model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_bert_base_has_the_counts_of_the_source():
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3))
    rebuild(model, method("oelm_v2"), seed=None)
    counts = count(model)
    found = counts["total"], counts["trainable"], counts["frozen"]
    assert found == (109_484_547, 95_310_339, 14_174_208)


def test_baseline_leaves_the_model_as_it_is():
    model, twin = build("bert"), build("bert")
    oelm.hf.convert(model, "baseline")
    assert model.oelm.matched == {}
    assert hashes(model) == hashes(twin)
    assert not any(isinstance(m, Projection) for m in model.modules())


def test_it_names_what_it_matched():
    model = oelm.hf.convert(build("gpt2"), "oelm_q_only")
    assert model.oelm.matched == {f"transformer.h.{i}.attn.c_attn": "q" for i in (0, 1)}
    assert isinstance(model.transformer.h[0].attn.c_attn.k, nn.Linear)


def test_a_subset_of_layers():
    spec = {"base": "baseline", "qk": {"init": "keep", "trains": "layers", "layers": [1]}}
    model = oelm.hf.convert(build("t5"), spec)
    frozen = {n for n, role in roles(model).items() if role == "frozen"}
    assert len(frozen) == 6
    assert all(".block.0." in name for name in frozen)


def test_half_of_the_heads_stay_as_they_were():
    spec = "baseline,qk.init=keep,qk.trains=ratio,qk.freeze_ratio=0.5,qk.ratio_of=heads"
    model = build("llama")
    before = logits(model, "llama")
    oelm.hf.convert(model, spec)
    torch.testing.assert_close(logits(model, "llama"), before, atol=1e-6, rtol=1e-5)
    assert model.model.layers[0].self_attn.q_proj.frozen_weight.shape == (16, 32)
    assert model.model.layers[0].self_attn.k_proj.frozen_weight.shape == (8, 32)


def test_half_precision_stays_half():
    model = oelm.hf.convert(build("bert").to(torch.bfloat16), "oelm_v2")
    assert {t.dtype for _, t in weights(model) if t.is_floating_point()} == {torch.bfloat16}


def test_tied_projections_stay_tied():
    model = build("bert")
    first, second = (layer.attention.self for layer in model.bert.encoder.layer)
    second.query.weight = first.query.weight
    oelm.hf.convert(model, "oelm_v2")
    assert second.query.weight is first.query.weight
    assert count(model)["frozen"] == 4 * (32 * 32 + 32) - 32 * 32 - 32


def test_a_tie_to_what_trains_is_refused():
    model = build("bert")
    attention = model.bert.encoder.layer[0].attention.self
    attention.value.weight = attention.query.weight
    before = hashes(model)
    with pytest.raises(UserError, match=r"query shares its matrix with .*value.*untie"):
        oelm.hf.convert(model, "oelm_v2")
    assert hashes(model) == before


def test_no_recognisable_attention():
    with pytest.raises(UserError, match="Sequential has no attention that is recognised"):
        oelm.hf.convert(nn.Sequential(nn.Linear(4, 4)), "oelm_v2")
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=20)
    with pytest.raises(UserError, match="MambaForCausalLM has no attention"):
        oelm.hf.convert(transformers.MambaForCausalLM(config), "oelm_v2")


@pytest.mark.parametrize(
    ("prefix", "fields", "matrix"),
    [
        ("Phi3", {**GROUPED, **ORDINARY}, "Phi3Attention"),
        (
            "Bloom",
            {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 60},
            "BloomAttention",
        ),
        (
            "GPTBigCode",
            {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 60, **ORDINARY},
            "GPTBigCodeAttention",
        ),
    ],
)
def test_an_unknown_fused_layout_is_named_and_left_alone(prefix, fields, matrix):
    config = getattr(transformers, f"{prefix}Config")(**fields)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    before = hashes(model)
    with pytest.raises(
        UserError, match=rf"of {matrix} holds several projections.*GPT2Attention\.c_attn"
    ):
        oelm.hf.convert(model, "oelm_v2")
    assert hashes(model) == before


def test_torch_multihead_attention_is_refused():
    with pytest.raises(UserError, match="in_proj_weight of MultiheadAttention"):
        oelm.hf.convert(nn.TransformerEncoderLayer(16, 2), "oelm_v2")


def test_cross_attention_of_gpt2_is_refused():
    with pytest.raises(UserError, match=r"crossattention\.c_attn"):
        oelm.hf.convert(build("gpt2", add_cross_attention=True), "oelm_v2")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("oelm_temperature", "temperature per head is part of OELM's own attention"),
        ("oelm_v2,lr_by_layer=[1]", "are for OELM's own models"),
        ("oelm_bias,small_lr=10", "are for OELM's own models"),
        ("oelm_kernel", "a kernel of distance is part of OELM's own attention"),
        ("baseline,q.trains=layers,q.layers=[7]", "layers 0 to 1"),
        ("oelm_v3", "did you mean 'oelm_v2'"),
    ],
)
def test_a_method_that_does_not_fit_is_refused(spec, match):
    model = build("bert")
    before = hashes(model)
    with pytest.raises(UserError, match=match):
        oelm.hf.convert(model, spec)
    assert hashes(model) == before


def test_converting_twice_is_refused():
    model = oelm.hf.convert(build("bert"), "oelm_v2")
    with pytest.raises(UserError, match="converted already"):
        oelm.hf.convert(model, "oelm_v2")


def test_audit_of_a_model_that_was_never_converted():
    with pytest.raises(UserError, match="not converted"):
        oelm.hf.audit(build("bert"))


def test_audit_sees_a_frozen_matrix_that_moved():
    model = oelm.hf.convert(build("gpt2"), "oelm_v2")
    assert oelm.hf.audit(model)["verdict"] == "pass"
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.k.weight[0, 0] += 1
    result = oelm.hf.audit(model)
    assert result["verdict"] == "fail"
    assert result["problems"] == ["transformer.h.1.attn.c_attn.k.weight is frozen but moved"]
