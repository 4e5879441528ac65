"""The Triton kernels against the plain twin: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from repository import KITS

HERE = Path(__file__).parent
LIMITS = {"f32": 1e-5, "bf16": 1.5e-2, "f16": 2e-3, "fp8": 3e-3, "int8": 3e-3, "bits": 1e-30}
"""By the first word of a name. Beside equal inputs, K and V in fp8 and int8 differ where two roundings are as good."""


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("where", ["interpreted", "on the GPU"])
def test_kernels_compute_what_their_twin_computes(where: str) -> None:
    if where == "on the GPU" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    interpreted = "1" if where == "interpreted" else "0"
    environment = os.environ | {"TRITON_INTERPRET": interpreted, "PYTHONPATH": str(KITS)}
    script = str(HERE / "interpreted_kernels.py")
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    errors: dict[str, float] = json.loads(ran.stdout)
    assert len(errors) > 90
    wrong = {name: error for name, error in errors.items() if not error < LIMITS[name.split()[0]]}
    assert not wrong


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(HERE / "compiled_kernels.py")], env=environment, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "all", ran.stderr
