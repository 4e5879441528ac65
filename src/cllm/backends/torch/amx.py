"""AMX under torch on a CPU: some virtual machines announce it, but torch's bf16 products end there with SIGILL."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import cache

from cllm.machine import cpu_features

log = logging.getLogger("cllm")

_LIMIT = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_FP16"
_TRIAL_S = 120
_TRIAL = """
import torch
inputs, weights = (torch.ones(rows, 64, dtype=torch.bfloat16) for rows in (5, 128))
torch.nn.functional.linear(inputs, weights)
"""


@cache
def avoid_broken_amx() -> None:
    """Before the first product in bf16: try one in a process of its own, and do without AMX if that dies. Takes two
    seconds, and only where there is AMX and the environment says nothing about it."""
    if _LIMIT in os.environ or "amx_bf16" not in cpu_features() or _trial_survives():
        return
    os.environ[_LIMIT] = _WITHOUT_AMX
    log.warning("torch crashes with AMX on this machine: bf16 is computed without it (%s=%s)", _LIMIT, _WITHOUT_AMX)


def _trial_survives() -> bool:
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode >= 0
