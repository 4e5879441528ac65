"""The real model, twice: what is warm by the configuration comes from disk when a server starts again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest

from cllm.server.auth.key_file import add_key
from server_process import LIMIT_S, Served, serving
from thorough import slow

pytestmark = [slow, pytest.mark.model]

RULES = " ".join(f"Rule {number}: whoever reads this far keeps rule {number - 1} as well." for number in range(45))
WARMED = re.compile(r"kv\.warm\[0\]: (\d+) tokens \((\d+) already cached\), \S+ s, pinned")


def served(directory: Path, keys: Path) -> list[str]:
    warm = json.dumps([{"prompt": RULES, "role": "system"}])
    disk = ["kv.disk.enabled=true", f"kv.disk.directory={directory}"]
    return ["model.name=smollm2", *disk, f"kv.warm={warm}", f"server.api_keys={keys}", "server.api_key=sesame"]


def warmed(server: Served) -> tuple[int, int]:
    """Tokens, and those that were there before: said before the server says where it is."""
    (found,) = [match for line in server.lines if (match := WARMED.search(line))]
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("backend", ["native", "llama_cpp"])
def test_a_warm_prompt_is_loaded_and_not_computed_after_a_restart(backend: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    ann = {"authorization": f"Bearer {add_key(keys, 'ann', None)}"}
    settings = served(tmp_path / "kv", keys)
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Which is the last rule?"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answers = []
    for start in range(2):
        with serving(*settings, backend=backend) as server:
            assert httpx.get(f"{server.url}/ready").status_code == 200
            tokens, before = warmed(server)
            assert tokens > 600 and (before >= tokens - 16 if start else before == 0)
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=ann, timeout=LIMIT_S).json()
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens - 16
            answers.append(reply["choices"][0]["message"]["content"])
            kv = httpx.get(f"{server.url}/kv", headers={"authorization": "Bearer sesame"}).json()
            assert (kv["disk"]["loaded_tokens"] > 0) == bool(start)
            assert [(pin["state"], pin["shared"]) for pin in kv["details"]["pins"]["prefixes"]] == [("pinned", True)]
            server.send(signal.SIGINT)
            assert server.end() == 0
    assert answers[0] == answers[1]
