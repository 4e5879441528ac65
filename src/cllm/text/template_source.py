"""A model's chat template as it is in its file: a program that has not been looked at yet."""

from __future__ import annotations

from typing import NamedTuple

from cllm.models.gguf import GGUFModel
from cllm.text.vocab import special_name

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models without a template."""


class TemplateSource(NamedTuple):
    """`bos` and `eos`: the names of those tokens, or empty strings, for templates that use them."""

    source: str
    bos: str = ""
    eos: str = ""


def load_chat_template(model: GGUFModel, source: str | None = None) -> TemplateSource:
    """The template `source`, the file's own, or ChatML."""
    template = source or model.get("tokenizer.chat_template", "") or CHATML
    return TemplateSource(template, special_name(model, "bos"), special_name(model, "eos"))
