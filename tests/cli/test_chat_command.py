"""`cllm chat`: commands, files, pipes, and a person at a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_kit import FAKE, Here, process
from cllm.cli.chat.input import is_open, without_quotes
from cllm.dialect.grammar import AnswerForm
from cllm.structured.structure import Structure
from terminal_kit import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Terminal, at_terminal, pasted

TALK = ["chat", *FAKE, "-t", "0"]


def say(here: Here, tmp_path: Path, *lines: str, args: tuple[str, ...] = ("-n", "4")) -> tuple[dict[str, Any], str]:
    """A conversation over a pipe: its JSON, and what stood on stderr."""
    file = tmp_path / "talk.json"
    result = here(*TALK, *args, "--json", str(file), stdin="".join(f"{line}\n" for line in lines))
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text()), result.stderr


def questions(data: dict[str, Any]) -> list[str]:
    return [message["content"] for message in data["messages"] if message["role"] == "user"]


# -- commands ------------------------------------------------------------------------------------------------------


def test_the_model_is_an_argument(here: Here) -> None:
    assert "unknown model 'smollm3000'" in here("chat", "smollm3000", stdin="hi\n").stderr
    assert "two models given, a and b" in here("chat", "a", "--model", "b", *FAKE, stdin="").stderr
    assert here("chat", "a", "-m", "a", *FAKE, stdin="").returncode == 0


def test_settings_are_shown_changed_and_reset(here: Here, tmp_path: Path) -> None:
    data, told = say(here, tmp_path, "/set top_k 20", "/set top_p 0.5", "/set top_p default", "/set", "one")
    assert data["settings"] == {"temperature": 0.0, "max_tokens": 4, "top_k": 20}
    for line in (
        *("top_k = 20", "top_p = 0.5", "top_p = 1.0 (default)", "seed = random (default)", "temperature = 0.0"),
        "context_window = off (default)",
    ):
        assert line in told.splitlines()


def test_a_configured_window_is_shown(here: Here, tmp_path: Path) -> None:
    _, told = say(here, tmp_path, "/set", args=("--set", "kv.window.recent=64"))
    assert "context_window = 64 recent tokens, and the first 4 (default)" in told.splitlines()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("/set colour 1", "unknown parameter colour; choose from temperature, top_p"),
        ("/set top_p", "no value for top_p"),
        ("/set top_p often", "top_p is 'often'; it must be a number, or default"),
        ("/set top_p 2", "top_p is 2; it must be more than 0.0 and at most 1.0"),
        ("/set top_k 1.5", "top_k is 1.5; it must be a whole number"),
        ("/set seed 0.5", "seed is 0.5; it must be a whole number"),
        ("/set context_window 1", "context_window.recent is 1; it must be a whole number of at least 16"),
        ("/set context_window 100000", "the context is 4096; lower keep or recent"),
        ("/save", "no file given: type /save FILE"),
        ("/save /no/such/directory/x", "cannot write /no/such/directory/x: No such file"),
        ("/load /no/such/file", "cannot read /no/such/file: No such file"),
        ("/retry", "there is no question to answer again"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    here: Here,
    tmp_path: Path,
    command: str,
    problem: str,
) -> None:
    data, told = say(here, tmp_path, command, "one")
    assert problem in told.splitlines()[0]
    assert data["settings"] == {"temperature": 0.0, "max_tokens": 4} and questions(data) == ["one"]


def test_a_path_is_no_command(here: Here, tmp_path: Path) -> None:
    own = tmp_path / "notes.txt"
    lines = [f"{own} explain this", "/nowhere/at/all.txt?", "/tmp is full", " /set is a word", "/nonsense at all"]
    data, told = say(here, tmp_path, *lines)
    assert questions(data) == [line.strip() for line in lines[:4]]
    assert "unknown command /nonsense" in told


def test_three_quotes(here: Here, tmp_path: Path) -> None:
    lines = ['"""', "/reset is", "", '  no command"""', '"""one"""', '/system """', "Be", 'brief."""', '"""', "the end"]
    data, _ = say(here, tmp_path, *lines)
    assert questions(data) == ["/reset is\n\n  no command", "one", "the end"]
    assert data["messages"][0] == {"role": "system", "content": "Be\nbrief."}


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [('"""', True), ('"""a', True), ('"""a"""', False), ('""""', True), ('""""""', False), ("a", False), ("", False)],
)
def test_where_quotes_end(text: str, goes_on: bool) -> None:
    assert is_open(text) is goes_on


def test_quotes_are_not_said() -> None:
    assert without_quotes('"""\na "b"\n"""\n') == 'a "b"'
    assert without_quotes(' "a" ') == ' "a" '


def test_system_message(here: Here, tmp_path: Path) -> None:
    data, told = say(here, tmp_path, "/system Be brief.", "one", "/system Be long.", "two")
    assert [message["role"] for message in data["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert data["messages"][0]["content"] == "Be long." and told.count("system message set") == 2
    data, _ = say(here, tmp_path, "/system", "one", args=("--system", "Be brief."))
    assert questions(data) == ["one"] and len(data["messages"]) == 2


def test_retry_asks_the_last_question_again(here: Here, tmp_path: Path) -> None:
    data, _ = say(here, tmp_path, "one", "two", "/set temperature 3", "/set seed 5", "/retry")
    assert questions(data) == ["one", "two"] and len(data["messages"]) == 4
    second, third = data["answers"][1:]
    assert second["prompt_tokens"] == third["prompt_tokens"] and second["text"] != third["text"]
    assert data["messages"][-1]["content"] == third["text"]


def test_what_was_saved_goes_on(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    window = "/set context_window 64"
    first, told = say(here, tmp_path, "/system Be brief.", window, "/set stop ###", "one", f"/save {file}")
    assert f"saved to {file}" in told
    second, told = say(here, tmp_path, f"/load {file}", "two", args=())
    assert "2 messages from" in told
    assert questions(second) == ["one", "two"] and second["messages"][:3] == first["messages"]
    kept = {"temperature": 0.0, "max_tokens": 4, "stop": ["###"], "context_window": {"recent": 64, "keep": 4}}
    assert second["settings"] == kept


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[", "is not valid JSON"),
        ("[]", "expected a JSON object with messages"),
        ("{}", "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content must be text"),
        ('{"messages": [{"role": "judge", "content": ""}]}', "messages[0] must be an object whose role is one of"),
        ('{"messages": [], "settings": []}', "settings must be an object"),
        ('{"messages": [], "settings": {"colour": 1}}', "unknown parameter colour"),
        ('{"messages": [], "settings": {"top_p": 7}}', "top_p is 7"),
        ('{"messages": [], "settings": {"stop": "x"}}', "stop must be a list"),
        ('{"messages": [], "settings": {"context_window": 5}}', "context_window is 5"),
    ],
)
def test_a_file_that_is_not_right_changes_nothing(here: Here, tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(content)
    data, told = say(here, tmp_path, "one", f"/load {file}", "two")
    assert problem in told and questions(data) == ["one", "two"]


def test_a_full_context_says_what_to_do(here: Here, tmp_path: Path) -> None:
    small = ("-n", "4", "--set", "resources.max_context_length=512")
    data, told = say(here, tmp_path, "x" * 600, "/set context_window 128", "y" * 600, args=small)
    assert "/set context_window TOKENS continues with a rolling window" in told.splitlines()[1]
    assert questions(data) == ["y" * 600]
    assert "context of 512 tokens is full" not in told, "a window has no end"


def test_an_answer_that_was_cut_says_what_allows_longer_ones(here: Here, tmp_path: Path) -> None:
    _, told = say(here, tmp_path, "/set max_tokens 3", "one")
    why = "the answer ends here: max_tokens is 3; /set max_tokens NUMBER allows longer answers (or start with "
    assert f"{why}--max-tokens NUMBER)" in told.splitlines()
    _, told = say(here, tmp_path, "/set max_tokens 2000", "one")
    assert "(stop)" in told and "ends here" not in told


def test_json_on_stdout_is_alone(here: Here) -> None:
    result = here(*TALK, "-n", "4", "--json", "-", stdin="one\n/help\n")
    data = json.loads(result.stdout)
    assert questions(data) == ["one"] and data["answers"][0]["text"] in result.stderr


def test_stdin_that_is_not_text() -> None:
    result = process(*TALK, text=b"\xff\xfe\n")
    assert result.returncode == 2 and "stdin is not UTF-8 text" in result.stderr


# -- tools ---------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"], "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True},
}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOL]))
    return file


@pytest.fixture
def calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer with tools is a call, and no other is."""
    first = iter([True])

    def form(tools: Any, **rest: Any) -> AnswerForm:
        if next(first, False):
            return AnswerForm(tools, **{**rest, "required": True})
        return AnswerForm([], **{**rest, "structure": Structure("regex", "[a-z]{3}")})

    monkeypatch.setattr("cllm.tasks.chat.AnswerForm", form)


@pytest.mark.usefixtures("calls_once")
def test_a_call_is_shown_and_goes_on_with_its_result(here: Here, tmp_path: Path, tools: Path) -> None:
    lines = [f"/tools {tools}", "where is it?", '"""', "far", 'away"""', "thanks"]
    data, told = say(here, tmp_path, *lines, args=("-n", "100"))
    assert told.splitlines()[0] == "look: Looks."
    assert f"look {data['answers'][0]['calls'][0]['arguments']}\n" in told
    roles = [message["role"] for message in data["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    call, result = data["messages"][1]["tool_calls"][0], data["messages"][2]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"a": "x"})
    assert (result["tool_call_id"], result["content"]) == (call["id"], "far\naway")
    assert [answer["finish_reason"] == "tool_calls" for answer in data["answers"]] == [True, False, False]
    assert data["tools"] == [TOOL]


@pytest.mark.usefixtures("calls_once")
def test_a_call_without_a_result_ends_the_exchange(here: Here, tmp_path: Path, tools: Path) -> None:
    data, told = say(here, tmp_path, f"/tools {tools}", "where is it?", args=("-n", "100"))
    assert "the model needs the result to continue" in told
    assert "tool_calls" in data["messages"][-1]
    file = tmp_path / "unanswered.json"
    file.write_text(json.dumps(data))
    data, _ = say(here, tmp_path, f"/load {file}", "/tools off", "two")
    assert questions(data) == ["two"] and "tools" not in data


def test_tools_are_listed_and_removed(here: Here, tmp_path: Path, tools: Path) -> None:
    _, told = say(here, tmp_path, "/tools", f"/tools {tools}", "/tools", "/tools off")
    none = "no tools; /tools FILE loads them from a file in OpenAI's JSON format"
    assert told.splitlines() == [none, "look: Looks.", "look: Looks.", none]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}", "tools must be a list"),
        ("[1]", 'tools[0] must be an object with "type": "function" and function'),
        ('[{"type": "function", "function": {"name": "a b"}}]', "tools[0].function.name must be 1 to 128 letters"),
        ('[{"type": "function", "function": {"name": "a", "colour": 1}}]', "tools[0].function.colour is not known"),
        ('[{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]', "schema of an object"),
        ('[{"type": "function", "function": {"name": "a", "strict": "yes"}}]', "strict must be true or false"),
        (json.dumps([TOOL, TOOL]), "two tools have the name look"),
    ],
)
def test_tools_that_are_not_right_change_nothing(here: Here, tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(content)
    data, told = say(here, tmp_path, f"/tools {file}", "one")
    assert problem in told.splitlines()[0] and questions(data) == ["one"] and "tools" not in data


# -- a person at a terminal ----------------------------------------------------------------------------------------


@contextmanager
def talking(tmp_path: Path, *args: str, columns: int = 80) -> Iterator[Terminal]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}
    environment = {**own, "CLLM_CACHE_DIR": str(tmp_path / "cache")}
    file = tmp_path / "talk.json"
    command = [sys.executable, "-m", "cllm", *TALK, *args, "--json", str(file)]
    with at_terminal(command, environment, columns=columns) as terminal:
        terminal.wait_for(r"loading fake \.\.\.")
        terminal.wait_for("/help lists the commands")
        terminal.wait_for(READY)
        yield terminal


def said(tmp_path: Path) -> list[str]:
    return questions(json.loads((tmp_path / "talk.json").read_text()))


READY = r"\x1b\[\?2004h[^>]*>"
"""The editor waits for keys: it has asked to be told what is pasted, and its prompt stands there."""
ANSWERED = r"\d+ out \(\w+\)[^\]]*\][\s\S]*?" + READY


def test_what_is_pasted_is_one_question(tmp_path: Path) -> None:
    with talking(tmp_path, "-n", "4") as terminal:
        terminal.type(pasted("def f():\n    return 1\n\n/reset\n") + " explain" + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type("line one" + ALT_ENTER + "line two" + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type('"""quoted' + ENTER + 'still"""' + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert said(tmp_path) == ["def f():\n    return 1\n\n/reset\n explain", "line one\nline two", "quoted\nstill"]


def test_history_outlives_the_conversation(tmp_path: Path) -> None:
    with talking(tmp_path, "-n", "4") as terminal:
        terminal.type(pasted("one\ntwo") + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type("/bye" + ENTER)
        assert terminal.end() == 0
    assert (tmp_path / "cache" / "chat_history").stat().st_mode & 0o077 == 0
    with talking(tmp_path, "-n", "4") as terminal:
        terminal.type(UP + UP + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert said(tmp_path) == ["one\ntwo"]


def test_ctrl_c_stops_an_answer_or_a_line(tmp_path: Path) -> None:
    with talking(tmp_path, "-n", "1000", "--set", "backend.fake.latency_ms=20") as terminal:
        terminal.type("tell me everything" + ENTER)
        terminal.wait_for(r"\x1b\[\?2004l[\s\S]*?[a-z]{3}")
        terminal.type(CTRL_C)
        terminal.wait_for(r"\[stopped\]")
        terminal.wait_for(READY)
        terminal.type("half a line" + CTRL_C)
        terminal.wait_for(r"/help lists the commands[\s\S]*?" + READY)
        terminal.type("/set max_tokens 2" + ENTER)
        terminal.wait_for(r"max_tokens = 2[\s\S]*?" + READY)
        terminal.type("again" + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert said(tmp_path) == ["tell me everything", "again"]


def test_the_rolling_window_is_offered(tmp_path: Path) -> None:
    with talking(tmp_path, "-n", "4", "--set", "resources.max_context_length=512") as terminal:
        for wish, then in (("n" + ENTER, r"/set context_window TOKENS[\s\S]*?" + READY), (ENTER, ANSWERED)):
            terminal.type(pasted("x" * 600) + ENTER)
            terminal.wait_for(r"rolling window, which forgets the oldest messages\? \[Y/n\]")
            terminal.type(wish)
            terminal.wait_for(then)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    data = json.loads((tmp_path / "talk.json").read_text())
    assert data["settings"]["context_window"] == {"recent": 252, "keep": 4}
    assert questions(data) == ["x" * 600]


def test_a_history_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "chat_history").mkdir()
    with talking(tmp_path, "-n", "4") as terminal:
        terminal.type("one" + ENTER)
        terminal.wait_for(ANSWERED)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert re.search(r"cannot save the input history:\s+\S*chat_history", terminal.output)
