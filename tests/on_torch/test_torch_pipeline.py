"""Steps that are queued behind each other: with the device choosing tokens two steps deep, answers are those of the
host choosing them one step at a time. f32, on the CPU, where plain torch stands for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.backends.torch.backend import TorchBackend
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.request import Output, Request
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.kv.paged import PagedKVManager
from engine_kit import make_request
from torch_kit import BLOCK, build, open_backend, save

BLOCKS = 256
