"""Hugging Face: convert any model, export and import ours.

Importing this makes `AutoModelForCausalLM.from_pretrained` and its kin read what we save.
"""

import importlib.util

from oelm.errors import UserError

if importlib.util.find_spec("transformers") is None:
    raise UserError(
        "Hugging Face models need transformers; install it with `pip install 'oelm[hf]'`"
    )

from oelm.hf.convert import Conversion, audit, convert
from oelm.hf.export import export
from oelm.hf.gpt import OelmConfig, OelmForCausalLM
from oelm.hf.gpt2 import import_gpt2
from oelm.hf.loading import TreatmentConfig
from oelm.hf.thaw import Thaw

__all__ = [
    "Conversion",
    "OelmConfig",
    "OelmForCausalLM",
    "Thaw",
    "TreatmentConfig",
    "audit",
    "convert",
    "export",
    "import_gpt2",
]
