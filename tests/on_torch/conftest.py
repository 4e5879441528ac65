"""Without torch these tests are not even looked at: `make test-torch` installs it."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") and find_spec("transformers"):
    from cllm.backends.torch.amx import avoid_broken_amx

    avoid_broken_amx()  # what these tests compare with is computed by torch, too
    collect_ignore_glob: list[str] = []
else:
    collect_ignore_glob = ["test_*.py"]
