"""How `from_pretrained` learns of a treatment: recorded in `config.json`, rebuilt before loading.

transformers swaps modules between building a model and loading its weights in one place only, the
hook of its quantizers, which is open to others. We come in there; nothing is quantized.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from oelm.config import from_mapping
from oelm.hf.convert import conclude, rebuild
from oelm.methods import Method

NAME = "oelm"


@register_quantization_config(NAME)
@dataclass
class TreatmentConfig(QuantizationConfigMixin):
    """The entry of `config.json`: the method in full, and the seeds that its matrices came from."""

    quant_method: str = NAME  # type: ignore[assignment]
    method: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    frozen_seed: int = 0


@register_quantizer(NAME)
class Treated(HfQuantizer):
    """Builds the treated projections, empty; the checkpoint then fills them."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        about = self.quantization_config
        assert isinstance(about, TreatmentConfig)
        self.chosen = from_mapping(Method, about.method, what="config.json: method")
        self.matched = rebuild(model, self.chosen, seed=None)
        for name in self.matched:
            # Some models would fill `attention.q.weight` from above, where there may be none now.
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True  # type: ignore[assignment]

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        # From here on it is a model like any other; only the entry in its config stays.
        model.is_quantized = False  # type: ignore[assignment]
        model.config._is_quantized = False
        del model.hf_quantizer, model.quantization_method
        conclude(model, self.chosen, self.matched)
        return model

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` may write it."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the Trainer may train it."""
        return True
