"""What templates read beside the conversation: the date, the tools as text, whether to think; and what nobody gives."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from unittest import mock

import pytest

from cllm.errors import InvalidRequestError
from cllm.text import template_variables
from cllm.text.chat_template import ChatTemplate, PromptOptions
from cllm.text.tokenizer import ByteTokenizer

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "é<eos>", "parameters": {"type": "object", "properties": {}}}}


def rendered(source: str, **options: Any) -> str:
    tokenizer = ByteTokenizer()
    ids = ChatTemplate(source, bos="", eos="<eos>").encode(tokenizer, [USER], None, PromptOptions(**options))
    return tokenizer.decode(ids, skip_special=False)


def test_dates_are_todays() -> None:
    with mock.patch.object(template_variables, "datetime") as clock:
        clock.now.return_value = datetime(2031, 2, 3)
        assert rendered("{{ date_string }}, {{ datetime }}") == "03 Feb 2031, Feb 03 2031"
        assert rendered("{{ date_string }}", arguments={"date_string": "then"}) == "then"
        default = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        assert rendered(default + "{{ date_string }}") == "03 Feb 2031"
    assert rendered("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_functions_are_the_tools_as_text() -> None:
    assert rendered("{{ 'Functions: ' + functions }}") == "Functions: "
    text = rendered("{{ 'Functions: ' + functions }}<eos>", tools=[TOOL])
    assert text == f"Functions: {json.dumps([TOOL], indent=2, ensure_ascii=False)}<eos>"


def test_names_of_special_tokens_in_functions_stay_text() -> None:
    tokenizer = ByteTokenizer()
    template = ChatTemplate("{{ functions }}<eos>", bos="", eos="<eos>")
    ids = template.encode(tokenizer, [USER], None, PromptOptions(tools=[TOOL]))
    assert [token for token in ids if token > 255] == [tokenizer.EOS_ID]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'yes' if enable_thinking else 'no' }}", "yes"),
        ("{{ 'no' if enable_thinking is false else 'yes' }}", "yes"),
        ("{{ enable_thinking if enable_thinking is defined else 'own' }}", "own"),
        ("{{ 'own' if enable_thinking is undefined else enable_thinking }}", "own"),
        ("{{ enable_thinking | default('own') }}", "own"),
    ],
)
def test_models_think_unless_their_template_has_a_default_of_its_own(source: str, expected: str) -> None:
    assert rendered(source) == expected
    assert rendered(source, arguments={"enable_thinking": False}) in ("False", "no")


def test_what_nobody_gives_is_named() -> None:
    for source in ("{{ 'x' + location }}", "{{ location.city }}", "{{ location() }}"):
        with pytest.raises(InvalidRequestError, match=r"reads location, which nobody gives it; .*kwargs") as caught:
            rendered(source)
        assert "\n" not in str(caught.value)
    assert rendered("{{ 'x' + location }}", arguments={"location": "y"}) == "xy"
    assert rendered("{% if location %}{{ location }}{% endif %}{{ location }}") == ""


@pytest.mark.parametrize(
    "source", ["{% if messages[1] %}{% set x = 1 %}{% endif %}{{ x + 1 }}", "{{ messages[0].y.z }}"]
)
def test_what_the_messages_lack_is_another_matter(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="rejected the messages"):
        rendered(source)
