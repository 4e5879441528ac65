"""What was asked of all replicas at once: one answer from theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from cllm.errors import ModelUnavailableError
from cllm.kv.pins import WarmResult

T = TypeVar("T")


def results(answers: Mapping[str, T | BaseException], done: str) -> dict[str, T]:
    """The answers by replica, if all gave one. Otherwise raises: the error that all have, or one that says where
    `done` is true and where it is not."""
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, BaseException)}
    if errors and len(errors) == len(answers):
        raise next(iter(errors.values()))
    if errors:
        succeeded = len(answers) - len(errors)
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise ModelUnavailableError(f"{done} on {succeeded} of {len(answers)} replicas, not on {reasons}")
    return {name: answer for name, answer in answers.items() if not isinstance(answer, BaseException)}


def together(warmed: Mapping[str, WarmResult]) -> WarmResult:
    """What is true on every replica; it took as long as it took on the slowest."""
    found = list(warmed.values())
    refusals = {name: each.refusal for name, each in warmed.items() if each.refusal is not None}
    ends = [each.left_s for each in found if each.left_s is not None]
    return WarmResult(
        tokens=found[0].tokens,
        cached=min(each.cached for each in found),
        seconds=max(each.seconds for each in found),
        pin_id=found[0].pin_id if not refusals else None,
        pinned_tokens=min(each.pinned_tokens for each in found),
        left_s=min(ends, default=None),
        refusal=_refusal(refusals, len(found)),
    )


def _refusal(refusals: Mapping[str, str], replicas: int) -> str | None:
    if not refusals:
        return None
    if replicas == 1:
        return next(iter(refusals.values()))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    return f"on {len(refusals)} of {replicas} replicas: {reasons}"
