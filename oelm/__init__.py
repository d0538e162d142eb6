"""OELM: transformers with frozen orthogonal Query/Key projections, and the laboratory around them.

The names below load on first use, so that `import oelm` costs nothing and imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from oelm.version import __version__

if TYPE_CHECKING:
    from oelm.methods import Method, method
    from oelm.model.config import ModelConfig
    from oelm.model.encoder import Encoder
    from oelm.model.gpt import GPT

_HOMES = {
    "GPT": "oelm.model.gpt",
    "Encoder": "oelm.model.encoder",
    "ModelConfig": "oelm.model.config",
    "Method": "oelm.methods",
    "method": "oelm.methods",
}
__all__ = ["GPT", "Encoder", "Method", "ModelConfig", "__version__", "method"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'oelm' has no attribute {name!r}")
