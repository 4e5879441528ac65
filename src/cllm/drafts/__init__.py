"""Drafts without a draft model: what may come next, found in what was written before, and how much of it to try."""

from cllm.drafts.drafter import Drafter

__all__ = ["Drafter"]
