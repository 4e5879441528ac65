"""Speculative decoding without a draft model: drafts are looked up in the sequence itself and in recent answers."""

from cllm.drafts.drafter import Drafter

__all__ = ["Drafter"]
