"""A model's chat template as it is in its file: a program that has not been looked at yet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from cllm.models.gguf import GGUFModel
from cllm.text.vocab import special_name

log = logging.getLogger("cllm")

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
    own = model.get("tokenizer.chat_template", "")
    if not (source or own) and model.is_causal and not model.ranks:
        warn_of_chatml(model.path)
    return TemplateSource(source or own or CHATML, special_name(model, "bos"), special_name(model, "eos"))


def warn_of_chatml(path: Path) -> None:
    log.warning(
        "%s has no chat template: chats use ChatML, and answers may contain its marks, such as <|im_end|>, if the "
        "model was not trained with it; set model.chat_template to a file with the model's own",
        path.name,
    )
