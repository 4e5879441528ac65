"""Prompts cut to a number of tokens, for requests that ask for that instead of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from cllm.errors import InvalidRequestError
from cllm.text.tokenizer import TokenLimit

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.engine.params import SamplingParams
    from cllm.llm import AsyncLLM

AS_MANY_AS_FIT = -1


class Truncation(NamedTuple):
    most: int
    """Tokens to keep, or `AS_MANY_AS_FIT` beside the answer."""
    side: Literal["left", "right"] = "left"
    """Where it is cut: "left" keeps the last tokens."""

    def checked(self, llm: AsyncLLM, params: SamplingParams) -> Truncation:
        """With its number of tokens, which leave room for an answer."""
        limit = llm.text.prompt_limit(params)
        most = self.most
        if most == AS_MANY_AS_FIT:
            # The limit leaves room for one token.
            most = max(limit.most - max((params.max_tokens or 0) - 1, 0), 1)
        if not 0 < most <= limit.most:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {most}; it must be {AS_MANY_AS_FIT} or 1 to {limit.most}: {limit.reason}",
                "truncate_prompt_tokens",
            )
        return self._replace(most=most)

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[: self.most] if self.side == "right" else ids[-self.most :]

    def reading_limit(self, config: Config) -> TokenLimit:
        """How long a prompt may be before it is cut."""
        most = max(config.server.max_encode_tokens, self.most)
        return TokenLimit(most, f"at most {most} are read (server.max_encode_tokens)")
