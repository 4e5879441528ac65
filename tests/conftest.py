"""Tests keep nothing on disk unless they say so: what one computed is not for the next one to find."""

from __future__ import annotations

import os

os.environ["CLLM_KV__DISK__ENABLED"] = "false"
