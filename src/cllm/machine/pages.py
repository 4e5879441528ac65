"""Whether the system has large pages for those who ask."""

from __future__ import annotations

import re
from pathlib import Path

from cllm.machine.cgroups import read_text

_ROOT = Path("/")
_SETTING = "sys/kernel/mm/transparent_hugepage/enabled"


def offers_large_pages(root: Path = _ROOT) -> bool:
    """The setting reads like `always [madvise] never`; where it is missing the system knows only usual pages."""
    chosen = re.search(r"\[(\w+)\]", read_text(root / _SETTING) or "")
    return chosen is not None and chosen[1] in ("always", "madvise")
