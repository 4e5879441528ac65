"""Settings of chats: how tool calls and reasoning are written and read."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ChatConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    tool_format: Literal["auto", "hermes", "llama3", "mistral", "json"] = Field(
        default="auto", description="how the model writes tool calls (docs/tools.md); auto: as its chat template does"
    )
    reasoning: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="put reasoning into reasoning_content; auto: where the chat template has marks for it; off: leave "
        "it in the text, unless a request says otherwise",
    )
    reasoning_format: Literal["auto", "think", "mistral", "seed", "cohere"] = Field(
        default="auto", description="the marks around reasoning; auto: those of the chat template, or else <think>"
    )
