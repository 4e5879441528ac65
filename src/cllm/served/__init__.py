"""Several models behind one server.

entries.py   the configured models: names, settings, memory estimates
memory.py    how much memory each may take of the common budget
models.py    loading and unloading
"""

from cllm.served.entries import ServedModel
from cllm.served.models import ServedModels

__all__ = ["ServedModel", "ServedModels"]
