"""The Triton kernels, in Triton's interpreter, against the plain twin: no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMITS = {"f32": 1e-5, "bf16": 1.5e-2, "f16": 2e-3}


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_compute_what_their_twin_computes() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    ran = subprocess.run(
        [sys.executable, str(HERE / "interpreted_kernels.py")], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    errors: dict[str, float] = json.loads(ran.stdout)
    assert len(errors) > 30
    wrong = {name: error for name, error in errors.items() if not error < LIMITS[name.split()[0]]}
    assert not wrong
