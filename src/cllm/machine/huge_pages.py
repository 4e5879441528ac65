"""Whether the system offers huge pages on request."""

from __future__ import annotations

import re
from pathlib import Path

from cllm.machine.cgroups import read_text

_ROOT = Path("/")
_SETTING = "sys/kernel/mm/transparent_hugepage/enabled"


def has_huge_pages(root: Path = _ROOT) -> bool:
    """The setting looks like `always [madvise] never`; if it is missing, there are no huge pages."""
    chosen = re.search(r"\[(\w+)\]", read_text(root / _SETTING) or "")
    return chosen is not None and chosen[1] in ("always", "madvise")
