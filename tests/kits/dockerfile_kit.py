"""Reads Dockerfiles and .dockerignore: instructions, stages, and what a build would copy."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME", "WORKDIR"),
}
"""Those we use. ADD would fetch from the network, SHELL and ONBUILD would change what others mean."""
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True)
class Instruction:
    word: str
    value: str

    @property
    def options(self) -> dict[str, str]:
        """`--from=build` and the like."""
        found = [word[2:].partition("=") for word in self.value.split() if word.startswith("--")]
        return {name: value for name, _, value in found} if self.word in ("COPY", "HEALTHCHECK", "FROM") else {}

    @property
    def arguments(self) -> list[str]:
        """Without the options."""
        return [word for word in shlex.split(self.value) if not word.startswith("--")]

    @property
    def command(self) -> list[str]:
        """The exec form: a list, which no shell changes."""
        text = self.value[self.value.index("[") :]
        command = json.loads(text)
        assert isinstance(command, list) and all(isinstance(word, str) for word in command)
        return command


@dataclass(frozen=True)
class Stage:
    base: str
    name: str | None
    instructions: list[Instruction]

    def all(self, word: str) -> list[Instruction]:
        return [each for each in self.instructions if each.word == word]

    def last(self, word: str) -> Instruction:
        return self.all(word)[-1]

    def environment(self, given: dict[str, str]) -> dict[str, str]:
        """What ENV makes of the given variables."""
        result = dict(given)
        for each in self.all("ENV"):
            for pair in shlex.split(each.value):
                name, equals, value = pair.partition("=")
                assert equals, f"ENV {each.value}: write NAME=VALUE"
                result[name] = _VARIABLE.sub(lambda found: result.get(found[1], ""), value)
        return result


def read_dockerfile(path: Path) -> list[Stage]:
    stages: list[Stage] = []
    for instruction in _instructions(path.read_text("utf-8")):
        assert instruction.word in INSTRUCTIONS, f"{path.name}: unknown instruction {instruction.word}"
        if instruction.word == "FROM":
            base, *rest = instruction.arguments
            assert not rest or (len(rest) == 2 and rest[0].upper() == "AS"), instruction
            stages.append(Stage(base, rest[1] if rest else None, []))
        else:
            assert stages, f"{path.name}: {instruction.word} before FROM"
            stages[-1].instructions.append(instruction)
    return stages


def _instructions(text: str) -> list[Instruction]:
    """A backslash continues a line; comments and empty lines within do not end it."""
    found: list[Instruction] = []
    parts: list[str] = []
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            word, _, value = " ".join(parts).partition(" ")
            found.append(Instruction(word, value.strip()))
            parts = []
    assert not parts, "the last line is continued"
    return found


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves a file out: the last pattern that matches it, or a directory above it, decides."""
    ignored = False
    steps = path.split("/")
    above = ["/".join(steps[:count]) for count in range(1, len(steps) + 1)]
    for pattern in patterns:
        plain = pattern.removeprefix("!").strip("/")
        if any(_matches(each, plain) for each in above):
            ignored = not pattern.startswith("!")
    return ignored


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatchcase(path.rpartition("/")[2], pattern[3:])
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def read_ignored(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
