"""The limit of open files."""

from __future__ import annotations

import resource


def raise_open_file_limit(wanted: int) -> int | None:
    """Raise the limit of open files as far as needed and allowed. Returns the limit; None if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    if soft == infinite or soft >= wanted:
        return None if soft == infinite else soft
    raised = wanted if hard == infinite else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):
        return soft
    return raised
