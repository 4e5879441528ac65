"""What templates see of tools, calls and results, and that none of it becomes a special token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.config.schema import ChatConfig
from cllm.dialect.dialect import Dialect
from cllm.dialect.grammar import AnswerForm
from cllm.errors import InvalidRequestError
from cllm.text.chat_template import ChatTemplate, PromptOptions
from cllm.text.template_source import CHATML
from cllm.text.tokenizer import ByteTokenizer

HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<eos>{{ m.role }}:{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.name }}/{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<eos>assistant:{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('9!') }}{% endif %}{{ call.function | tojson }}{{ call.id }}"
    "{% endfor %}{% else %}{{ m.content }}{{ m.tool_call_id }}{% endif %}{% endfor %}{{ tools | length if tools }}"
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "call_1"},
]


def prompt(
    source: str, messages: Any, *, tokenizer: ByteTokenizer | None = None, tool_format: str = "auto", **options: Any
) -> str:
    tokenizer = tokenizer or ByteTokenizer()
    template = ChatTemplate(source, bos="", eos="<eos>")
    dialect = Dialect(template.facts, tokenizer, ChatConfig(tool_format=tool_format))
    ids = template.encode(tokenizer, *_with_limit(dialect.prepare(messages, PromptOptions(**options))))
    return tokenizer.decode(ids, skip_special=False)


def _with_limit(prepared: Any) -> tuple[Any, None, PromptOptions]:
    return prepared[0], None, prepared[1]


def test_a_template_that_knows_tools_gets_them() -> None:
    text = prompt(HERMES, HISTORY, tools=[TOOL])
    assert text.startswith(f"<tools>{json.dumps(TOOL)}\n</tools>")
    assert '<tool_call>{"name": "f", "arguments": {"a": "é"}}' in text
    assert text.endswith("<eos>tool:42[f/call_1]<eos>assistant:")


def test_a_template_that_shows_functions_gets_them() -> None:
    source = HERMES.replace("{% if tools %}", "{% if functions %}{{ functions }}", 1).replace(
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}", ""
    )
    text = prompt(source, [USER], tools=[TOOL])
    assert text.startswith(f"{json.dumps([TOOL], indent=2)}<tools></tools>")
    assert "You can call" not in text


def test_arguments_as_text_where_the_template_can_only_write_that() -> None:
    source = HERMES.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
    assert '<tool_call>{"name": "f", "arguments": {"a": "é"}}' in prompt(source, HISTORY, tools=[TOOL])


def test_arguments_that_are_no_json_stay_text() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [broken]}]
    assert '"arguments": "{\\"a\\": "}' in prompt(HERMES, messages)


def test_mistral_gets_ids_of_nine_characters() -> None:
    text = prompt(MISTRAL, HISTORY, tools=[TOOL])
    made = text[len('hi[TOOL_CALLS]{"name": "f", "arguments": {"a": "é"}}') :][:9]
    assert made.isalnum()
    assert text.endswith(f"42{made}1")
    kept = [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": "abcDEF123"}]}]
    assert "abcDEF123" in prompt(MISTRAL, kept)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["c", "b"]},
            {"b": "...", "c": "..."},
        ),
        ({"type": "object", "properties": {"a": {}, "b": {}}}, {"a": "..."}),
        ({"type": "object", "properties": {"a": {}}, "required": 5}, {"a": "..."}),
        ({"type": "object", "properties": {}}, {}),
        ({"type": "object"}, {}),
    ],
)
def test_the_form_of_a_call_is_shown_with_a_tool_of_the_request(parameters: Any, arguments: Any) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    text = prompt(CHATML, [USER], tools=[tool, TOOL])
    assert f"nothing but:\n{json.dumps({'name': 'look_up', 'arguments': arguments})}<|im_end|>" in text


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_a_template_that_knows_none_is_told_in_the_system_message(tool_format: str) -> None:
    text = prompt(CHATML, HISTORY, tools=[TOOL], tool_format=tool_format)
    told, _, rest = text.partition("<|im_end|>\n")
    assert told.startswith("<|im_start|>system\nYou can call these tools:\n" + json.dumps(TOOL["function"]))
    assert ("<tool_call>" in told) == (tool_format == "hermes")
    call = '{"name": "f", "arguments": {"a": "é"}}'
    written = f"<tool_call>\n{call}\n</tool_call>" if tool_format == "hermes" else call
    assert rest == (
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{written}<|im_end|>\n"
        "<|im_start|>user\nResult of f:\n42<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_systems_own_words_come_first_and_results_stand_together() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HISTORY, {"role": "tool", "content": "43"}]
    text = prompt(CHATML, messages, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert "Result of f:\n42\n\nResult:\n43<|im_end|>" in text


def test_a_template_without_system_messages_is_told_by_the_user() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    assert prompt(source, [USER], tools=[TOOL]).startswith("<|im_start|>user\nYou can call these tools:")


def test_plain_chats_are_as_they_were() -> None:
    messages = [{"role": "system", "content": "x"}, USER]
    assert prompt(CHATML, messages) == ChatTemplate(CHATML, bos="", eos="").render(messages)


def test_arguments_reach_the_template() -> None:
    source = "{{ enable_thinking }}{{ tools is none }}{{ documents is none }}{{ messages[0].content }}"
    assert prompt(source, [USER], arguments={"enable_thinking": False}) == "FalseTrueTruehi"
    for name in ("messages", "tools", "add_generation_prompt", "eos_token"):
        with pytest.raises(InvalidRequestError, match=rf"chat_template_kwargs\.{name}"):
            prompt(source, [USER], arguments={name: 1})


@pytest.mark.parametrize("content", ["So", "", "So <eo", "a<eos>b ", " x\n"])
@pytest.mark.parametrize("source", [CHATML, HERMES])
def test_the_last_message_is_continued(source: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    whole = prompt(source, messages, asks=False)
    text = prompt(source, messages, continues=True)
    assert text.endswith(f"{'assistant:' if source is HERMES else 'assistant' + chr(10)}{content}")
    assert whole.startswith(text)
    tokenizer = ByteTokenizer()
    template = ChatTemplate(source, bos="", eos="")
    ids = template.encode(tokenizer, messages, None, PromptOptions(continues=True))
    assert ids[len(ids) - len(content.encode()) :] == list(content.encode())


@pytest.mark.parametrize(
    ("source", "last"),
    [
        (CHATML, USER),
        (CHATML, {"role": "assistant", "tool_calls": [CALL]}),
        ("{{ messages | length }}", {"role": "assistant", "content": "x"}),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, last: dict[str, Any]) -> None:
    template = ChatTemplate(source, bos="", eos="")
    with pytest.raises(InvalidRequestError, match="continued"):
        template.encode(ByteTokenizer(), [USER, last], None, PromptOptions(continues=True))


EVIL = st.sampled_from(
    ["<eos>", "<bos>", "eos", "<e", "os>", "s", "name", "string", "x", "\\ue000", "\ue000", "é<eos>"]
)
NESTED = st.recursive(
    EVIL | st.integers(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(EVIL, inner, max_size=2)
)
WRITERS = [
    "{{ tools | tojson }}",
    "{{ tools }}",
    "{{ tools | tojson(ensure_ascii=True) }}",
    "<{{ tools[0].function.name }}>",
]
KEYS = "{% for key in tools[0].function.parameters.properties %}<{{ key }}>{% endfor %}"


@given(name=EVIL, description=EVIL, properties=st.dictionaries(EVIL, NESTED, max_size=3), arguments=NESTED)
@pytest.mark.parametrize("writer", [*WRITERS, KEYS])
def test_nothing_of_tools_becomes_a_special_token(
    writer: str, name: str, description: str, properties: dict[str, Any], arguments: Any
) -> None:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    tool = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    called = {"id": description, "type": "function", "function": {"name": name, "arguments": {"a": arguments}}}
    calls = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}<eos>"
    template = ChatTemplate(writer + calls, bos="", eos="")
    tokenizer = ByteTokenizer()
    messages = [{"role": "assistant", "content": "", "tool_calls": [called]}]
    options = PromptOptions(tools=[tool], arguments={"x": description})
    ids = template.encode(tokenizer, messages, None, options)
    assert [token for token in ids if token > 255] == [257]
    plain = template._template.render(messages=messages, tools=[tool])
    assert tokenizer.decode(ids, skip_special=False) == plain


def test_templates_still_find_what_they_look_for() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.special_tokens = {"<|string name type description|>": 257}
    source = (
        "{% set f = tools[0].function %}{{ f.name }}{% for key, value in f.parameters.properties.items() %}"
        "{{ ' is text' if value.type == 'string' }}{{ ' is needed' if key in f.parameters.required }}{% endfor %}"
    )
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ids = ChatTemplate(source, bos="", eos="").encode(tokenizer, [USER], None, PromptOptions(tools=[tool]))
    assert tokenizer.decode(ids) == "f is text is needed"


def test_tools_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"x": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(InvalidRequestError, match="64 levels") as caught:
        prompt(HERMES, [USER], tools=[tool])
    assert caught.value.param == "tools"


CODER = (
    "{% if tools %}<tools>{{ tools | length }}</tools>\n<tool_call>\n<function=name>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call><function={{ call.function.name }}>"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>{% endfor %}"
    "</function></tool_call>{% endfor %}{% endfor %}"
)


def test_tagged_calls_are_told_by_the_template_or_in_their_own_form() -> None:
    text = prompt(CODER, HISTORY, tools=[TOOL])
    assert text.startswith("<tools>1</tools>")
    assert "<tool_call><function=f><parameter=a>é</parameter></function></tool_call>" in text
    told = prompt(CHATML, HISTORY, tools=[TOOL], tool_format="qwen3_coder")
    assert "answer with nothing but:\n<tool_call>\n<function=f>\n</function>" in told
    assert "<function=f>\n<parameter=a>\né\n</parameter>\n</function>\n</tool_call>" in told


SINGLE = (
    "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one!') }}{% endfor %}" + HERMES
)
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns!') }}"
    "{% endif %}{% endfor %}" + CHATML
)
OBJECTS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% for key in call.function.arguments.items() %}"
    "{% endfor %}{% endfor %}{% endfor %}" + HERMES
)


def test_several_calls_one_by_one_where_the_template_takes_no_more() -> None:
    calls = [{**CALL, "id": name, "function": {"name": name, "arguments": "{}"}} for name in "abc"]
    results = [{"role": "tool", "content": f"of {name}", "tool_call_id": name} for name in "ba"]
    messages = [USER, {"role": "assistant", "content": "So", "tool_calls": calls}, *results, USER]
    text = prompt(SINGLE, messages, tools=[TOOL])
    assert [text.count(f'"name": "{name}"') for name in "abc"] == [1, 1, 1]
    order = ['"name": "b"', "of b[", '"name": "a"', "of a[", '"name": "c"']
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    template = ChatTemplate(SINGLE, bos="", eos="<eos>")
    form = AnswerForm([("f", None)], required=True)
    several = '(BLANK? "<tool_call>" call)*'
    assert several not in Dialect(template.facts, ByteTokenizer(), ChatConfig()).grammar(form)
    assert several in Dialect(ChatTemplate(HERMES, bos="", eos="<eos>").facts, ByteTokenizer(), ChatConfig()).grammar(
        form
    )


def test_calls_without_ids_are_answered_in_their_order() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "content": f"result {number}"} for number in (1, 2)]
    called = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    text = prompt(SINGLE, [USER, called, *results], tools=[TOOL])
    order = text.index("result 1"), text.index("result 2")
    assert (text[: order[0]].count('"name": "f", "arg'), text[order[0] : order[1]].count('"name": "f", "arg')) == (1, 1)


def test_a_template_that_writes_broken_calls_can_be_used() -> None:
    broken = HERMES.replace("{{ call.function.arguments | tojson }}}", "{{ call.function.arguments | tojson }}{}")
    cut_off = HERMES.replace("{{ call.function.arguments | tojson }}}</tool_call>", '{"key": "')
    assert all("hi" in prompt(source, [USER], tools=[TOOL]) for source in (broken, cut_off))


def test_arguments_that_are_no_json_become_an_object_where_the_template_takes_no_text() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [broken]}]
    assert '"arguments": {"arguments": "{\\"a\\": "}}' in prompt(OBJECTS, messages)


def test_markers_of_another_format_are_not_taken_for_ours() -> None:
    odd = HERMES.replace('{\\"name\\": \\"', "").replace('{"name": "', "")
    text = prompt(odd, [USER], tools=[TOOL])
    assert "<tools>" not in text
    assert "You can call these tools" in text


def test_calls_are_text_where_the_template_leaves_them_out() -> None:
    source = "{% if tools %}<tools><tool_call>{% endif %}" + CHATML
    text = prompt(source, HISTORY, tools=[TOOL])
    assert text.startswith("<tools><tool_call><|im_start|>user\nhi")
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|im_end|>' in text
    assert "Result of f:\n42" in text


def test_roles_are_adapted_to_templates_that_want_turns() -> None:
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Yes"}
    text = prompt(TURNS, [system, USER, USER, answer, answer, system, USER])
    assert text == (
        "<|im_start|>user\nBe brief.\n\nhi\n\nhi<|im_end|>\n<|im_start|>assistant\nYes\n\nYes<|im_end|>\n"
        "<|im_start|>user\nBe brief.\n\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(TURNS, [answer, USER]).startswith("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nYes")
    refuses = "{{ raise_exception('never!') }}"
    with pytest.raises(InvalidRequestError, match="never!"):
        prompt(refuses, [system, USER, USER])


def test_templates_that_want_descriptions_get_empty_ones() -> None:
    source = "{% for tool in tools or [] %}{{ 'About: ' + tool.function.description }}{% endfor %}" + HERMES
    assert prompt(source, [USER], tools=[TOOL]).startswith("About: Does it.<tools>")
    bare = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    text = prompt(source, [USER], tools=[bare])
    assert text.startswith("About: <tools>")
    assert '{"a": {"description": ""}}' in text


def test_templates_that_want_a_list_of_tools_get_one() -> None:
    assert prompt("{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}", [USER]) == "hi"
