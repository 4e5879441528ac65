"""Several models behind one server.

entries.py   the models of a configuration: names, settings, estimates
memory.py    what each may take of one budget
models.py    loading, unloading, and who uses what
"""

from cllm.served.entries import Served
from cllm.served.models import ServedModels

__all__ = ["Served", "ServedModels"]
