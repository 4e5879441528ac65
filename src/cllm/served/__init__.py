"""The models behind a server: one, or several that share its memory.

model_set.py what a server needs of them, and models that stay loaded, such as the only one
entries.py   the configured models: names, settings, memory estimates
models.py    several: loading and unloading
memory.py    how much memory each of several may take of the common budget
"""

from cllm.served.entries import ServedModel
from cllm.served.model_set import FixedModels, ModelSet, only_model
from cllm.served.models import ServedModels, open_models

__all__ = ["FixedModels", "ModelSet", "ServedModel", "ServedModels", "only_model", "open_models"]
