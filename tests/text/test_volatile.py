"""What changes with every request is taken out of system prompts, and nothing else is."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.config import Config, InvalidConfigError, load_config
from cllm.config.line_pattern import LinePattern, PatternError
from cllm.config.schema import BILLING_HEADER
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from cllm.text.volatile import HEAD_CHARACTERS, HEAD_MESSAGES, LINE_CHARACTERS, VolatilePatterns

HEADER = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
RULES = "You are a coding agent.\nBe brief; a=b; is no header.\n\nRules follow."


def stripped(content: Any, role: str = "system", patterns: tuple[str, ...] = (BILLING_HEADER,)) -> Any:
    return VolatilePatterns(patterns).strip([{"role": role, "content": content}])[0]["content"]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    "content",
    [
        f"{HEADER}\n{RULES}",
        f"{HEADER}{RULES}",  # whoever joined the parts put nothing in between
        f"{HEADER}  \n{RULES}",
        f"{HEADER}\r\n{RULES}",
        f"{HEADER[:-1]}\n{RULES}",  # the last value without its semicolon
        f"{HEADER[:-1]} {RULES}",
        f"{HEADER} other={{}}; more=x.y-z;\n{RULES}",
        f"{HEADER}\n{HEADER}\n{RULES}",
    ],
)
def test_the_billing_header_goes(role: str, content: str) -> None:
    assert stripped(content.replace("{}", "eb6c6"), role) == RULES


def test_parts_are_looked_at_one_by_one() -> None:
    header, rules = ({"type": "text", "text": text} for text in (HEADER.format("eb6c6"), RULES))
    assert stripped([header, rules]) == [rules]
    assert stripped([rules, header]) == [rules]
    assert stripped([{"type": "text", "text": ""}, rules]) == [{"type": "text", "text": ""}, rules]


@pytest.mark.parametrize(
    "content",
    [
        RULES,
        "",
        "\n\n",
        f"Never write {HEADER}",  # not at the beginning of a line
        "x-anthropic-billing-header: some words that are no values",
        "x-anthropic-billing-header",
        "y" * HEAD_CHARACTERS + f"\n{HEADER}\n",  # no head any more
        None,
        7,
        b"bytes",
        [7, {"type": "image_url"}, {"type": "text"}],
    ],
)
def test_everything_else_stays(content: Any) -> None:
    assert stripped(content) == content


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_only_system_prompts_are_changed(role: str) -> None:
    assert stripped(f"{HEADER}\n{RULES}", role) == f"{HEADER}\n{RULES}"


def test_messages_that_are_none_are_for_others_to_refuse() -> None:
    wrong: Any = [7, None, {}, {"role": "system"}, {"content": "x"}]
    assert VolatilePatterns([BILLING_HEADER]).strip(wrong) == wrong


def test_only_the_first_messages_are_looked_at() -> None:
    messages = [{"role": "system", "content": HEADER}] * (HEAD_MESSAGES + 1)
    left = VolatilePatterns([BILLING_HEADER]).strip(messages)
    assert [message["content"] for message in left] == [""] * HEAD_MESSAGES + [HEADER]


def test_nothing_is_done_without_patterns() -> None:
    messages = [{"role": "system", "content": HEADER}]
    assert VolatilePatterns([]).strip(messages) is messages


def test_a_pattern_sees_the_beginning_of_a_line_and_no_more() -> None:
    for length in (LINE_CHARACTERS - 1, LINE_CHARACTERS, LINE_CHARACTERS + 1):
        left = stripped("x" * length + "\nnext", patterns=("x+",))
        assert left == ("x" * (length - LINE_CHARACTERS) + "\n" if length > LINE_CHARACTERS else "") + "next"


@given(st.text(st.sampled_from("ab\n\r "), max_size=40))
def test_lines_that_do_not_match_stay_as_they_are(text: str) -> None:
    assert stripped(text, patterns=("never",)) == text
    kept = [line for line in text.split("\n") if not line.startswith("a")]
    assert [line for line in stripped(text, patterns=("a.*",)).split("\n") if line] == [line for line in kept if line]


# -- the setting ---------------------------------------------------------------------------------------------------


def test_patterns_are_read_and_can_be_switched_off() -> None:
    def patterns(value: str) -> tuple[str, ...]:
        from cllm.config import parse_assignment

        key, read = parse_assignment(f"prompt.volatile_patterns={value}")
        return load_config(None, {key: read}, {}).config.prompt.volatile_patterns

    assert load_config(None, {}, {}).config.prompt.volatile_patterns == (BILLING_HEADER,)
    assert patterns("[]") == ()
    assert patterns(r"['session-id: \w+', 'date: .*']") == (r"session-id: \w+", "date: .*")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("x(", "missing )"),
        ("a*", "matches the empty string"),
        ("", "matches the empty string"),
        ("(a*)?", "matches the empty string"),
        ("a|", "matches the empty string"),
        ("a)", "unexpected )"),
        ("[a", "missing ]"),
        ("[z-a]", "invalid character class range"),
        ("*a", "no argument for repetition"),
        ("a**", "bad repetition operator: **"),
        ("a++", "bad repetition operator: ++"),
        ("a+?", "uses +?, which is not supported here"),
        ("a{2,3}?b", "uses {2,3}?, which is not"),
        ("a{2}{3}", "bad repetition operator: {2}{3}"),
        ("a{3,2}", "invalid repetition size: {3,2}"),
        ("a{99999999}", "invalid repetition size"),
        ("a\\", "trailing \\"),
        (r"(a)\1", r"invalid escape sequence: \1"),
        ("a(?=b)", "invalid perl operator: (?="),
        ("(a{100}){100}", "invalid repetition size"),
        (r"\w{900}", "pattern too large"),
    ],
)
def test_a_wrong_pattern_is_refused_at_the_start(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"volatile_patterns is .*regular expressions") as raised:
        load_config(None, {"prompt.volatile_patterns": ["good", pattern]}, {})
    assert reason in str(raised.value) and repr(pattern) in str(raised.value)


SLOW = [
    r"\d*\d*\d*\d*\d*\d*x",
    r"(?:[\s\S]*){5}x",
    r"(?:\w+\s*){6}:",
    "(a{0,15}){0,15}b",
    r"(?:\w{0,15}){15}x",
    "(a+)+b",
]
"""With these, Python's own expressions take longer than anybody waits."""


@pytest.mark.parametrize("pattern", SLOW)
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    assert load_config(None, {"prompt.volatile_patterns": [pattern]}, {}).config.prompt.volatile_patterns == (pattern,)
    for char in "a1 ":
        line = char * LINE_CHARACTERS
        assert LinePattern(pattern).match(line) is None


@pytest.mark.parametrize(
    ("pattern", "line", "end"),
    [
        ("x-[a-z]+: .*", "x-date: today", 13),
        ("^(?:ab{2})+c", "abbabbcd", 7),
        ("a|ab|abc", "abd", 2),
        (r"\[Context: Current time is [^\]]*\]", "[Context: Current time is now] x", 30),
        ("(?i:Date): .*", "DATE: x", 7),
        ("(?i)Date: [x]", "dAtE: X", 7),
        ("(?i:Date): x", "date: X", None),
        ("a{,2}b{1,}c{2}", "abbcc", 5),
        ("a{b}{", "a{b}{", 5),
        (r"[]^\]]+\.\t?", "]^].", 4),
        (r"\w+: [\w ]*\d", "März: ١. 日本 x٣.", 7),
        (r"\w+: [\w .]+\d", "März: ١. 日本 x٣.", 14),
        (r"a\s[\s;]", "a\u00a0\u2003b", 3),
        (r"\W\S\D", "—é—", 3),
        (r"\W|\S\d", "é", None),
        (r"[^\w;]+", "-— é", 3),
        (r"\[\d\]", "[7]", 3),
        (r"\{,2}", "{,2}", 4),
        ("x.y", "x\ud800yz", 3),
        ("a$", "ab", None),
    ],
)
def test_a_pattern_matches_what_it_says(pattern: str, line: str, end: int | None) -> None:
    assert LinePattern(pattern).match(line) == end


def rows(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.tuples(parts, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{,2}"])).map("".join)
    row = st.lists(repeated, min_size=1, max_size=3).map("".join)
    return st.lists(row, min_size=1, max_size=2).map(lambda ways: f"(?:{'|'.join(ways)})")


PATTERNS = st.recursive(st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "-"]), rows, max_leaves=5)


@given(PATTERNS, st.text(st.sampled_from("ab-é"), max_size=7))
def test_the_longest_match_is_found(pattern: str, line: str) -> None:
    """Held against Python's own."""
    if re.fullmatch(pattern, ""):
        with pytest.raises(PatternError, match="empty string"):
            LinePattern(pattern)
        return
    ends = [end for end in range(len(line) + 1) if re.fullmatch(pattern, line[:end])]
    assert LinePattern(pattern).match(line) == max(ends, default=None)


def test_the_default_pattern_takes_no_longer_for_a_line_that_is_made_for_it() -> None:
    for filler in ("a=", "a=;", "a", "a=a", " a="):
        head = "x-anthropic-billing-header:" + filler * 3000
        assert stripped(head + "\n" + RULES).endswith(RULES)


# -- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patterns", [(BILLING_HEADER,), ()])
@pytest.mark.parametrize("as_parts", [False, True])
async def test_requests_that_differ_in_the_header_alone_share_the_whole_prefix(
    patterns: tuple[str, ...], as_parts: bool
) -> None:
    config = Config.model_validate(
        {
            "backend": {"type": "fake"},
            "resources": {"kv_cache_max_memory_mb": 8, "max_context_length": 4096},
            "prompt": {"volatile_patterns": patterns},
        }
    )

    def body(stamp: str) -> dict[str, Any]:
        texts = [HEADER.format(stamp), RULES * 20]
        content: Any = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
        messages = [{"role": "system", "content": content}, {"role": "user", "content": "hi"}]
        return {"messages": messages, "max_tokens": 3, "temperature": 0}

    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            stamps = ("eb6c6", "0aaa9", "36ee5")
            replies = [(await client.post("/v1/chat/completions", json=body(stamp))).json() for stamp in stamps]
    lengths = [reply["usage"]["prompt_tokens"] for reply in replies]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert len(set(lengths)) == 1
    assert cached[0] == 0
    if patterns:
        whole = (lengths[0] - 1) // config.resources.block_size * config.resources.block_size
        assert cached[1:] == [whole, whole]
        assert replies[0]["choices"] == replies[1]["choices"] == replies[2]["choices"]
    else:
        assert max(cached) < len(HEADER) + 64
