"""What a thousand keys with a cache space each cost a request, against one key.

    python benchmarks/tenants.py --json tenants.json

Three servers get the same requests in turn, one at a time: one key, a thousand keys, and one key again, which shows how
much of a difference is noise. The fake backend computes nothing, so that whatever cLLM does around it weighs most;
`--backend native` takes a real model. Every user has a prompt of its own and comes back to it, so that all servers find
the same in their caches. Wall time is the client's, CPU time the server process's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

from cllm.server.key_file import KeyFile, NamedKey, digest, new_salt

READY = re.compile(r"cLLM is ready: http://127\.0\.0\.1:(\d+)")
ROLES = ("one key", "many keys", "one key again")


@dataclass
class Side:
    """A server with the keys it is asked with, and what its requests took."""

    process: subprocess.Popen[str]
    keys: list[str]
    connection: http.client.HTTPConnection
    seconds: list[float] = field(default_factory=list)
    cached: int = 0

    def ask(self, user: int, prompt: str, tokens: int) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
        key = self.keys[user % len(self.keys)]
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        started = perf_counter()
        self.connection.request("POST", "/v1/completions", body, headers)
        response = self.connection.getresponse()
        reply = json.loads(response.read())
        self.seconds.append(perf_counter() - started)
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {reply}")
        self.cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(args: argparse.Namespace, keys: list[str], settings: list[str]) -> Iterator[Side]:
    command = [sys.executable, "-m", "cllm", "serve", "--backend", args.backend, "--port", "0"]
    for setting in ("log.level=warning", f"resources.kv_cache_max_memory_mb={args.kv_mb}", *settings):
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = READY.match(process.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start")
            yield Side(process, keys, http.client.HTTPConnection("127.0.0.1", int(found[1])))
        finally:
            process.terminate()


def write_keys(path: Path, count: int) -> list[str]:
    """As `cllm keys add` would, `count` times."""
    salt, keys = new_salt(), [f"sk-cllm-{random.randbytes(32).hex()}" for _ in range(count)]
    stored = tuple(
        NamedKey(name=f"user-{n}", digest=digest(key.encode(), salt).hex(), max_concurrent=8)
        for n, key in enumerate(keys)
    )
    path.write_text(KeyFile(salt=salt, keys=stored).model_dump_json())
    return keys


def measure(sides: list[Side], args: argparse.Namespace) -> dict[str, object]:
    chance = random.Random(1)
    own = [f"User {n}: " + "".join(chance.choices("abcdefgh ", k=args.prompt)) for n in range(args.keys)]
    users = list(range(args.keys)) + chance.choices(range(args.keys), k=args.requests)
    before: list[float] = []
    for number, user in enumerate(users):
        if number == args.keys:  # everybody was here once: from now on it counts
            before = [side.cpu_seconds() for side in sides]
            for side in sides:
                side.seconds.clear()
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            side.ask(user, f"{own[user]} Question {number}.", args.tokens)
    cpu = [side.cpu_seconds() - start for side, start in zip(sides, before, strict=True)]
    one = sides[0].seconds
    ratios = [median(ours / theirs for ours, theirs in zip(side.seconds, one, strict=True)) for side in sides]
    return {
        role: {
            "median_ms": median(side.seconds) * 1e3,
            "ratio_of_pairs": ratio,
            "cpu_ms_per_request": used / args.requests * 1e3,
            "cpu_ratio": used / cpu[0],
            "cached_tokens": side.cached,
        }
        for role, side, ratio, used in zip(ROLES, sides, ratios, cpu, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fake")
    parser.add_argument("--kv-mb", type=float, default=8, help="a token of the fake backend takes 8 bytes")
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--prompt", type=int, default=512, help="characters of a user's own prompt")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / "keys.json"
        many = write_keys(file, args.keys)
        ways = (["one"], ["server.api_key=one"]), (many, [f"server.api_keys={file}"]), (["one"], ["server.api_key=one"])
        sides = [stack.enter_context(serving(args, keys, settings)) for keys, settings in ways]
        result = measure(sides, args)
    print(f"{'':16}{'median ms':>11}{'of pairs':>10}{'CPU ms':>9}{'ratio':>8}{'cached':>10}")
    for role, row in result.items():
        assert isinstance(row, dict)
        wall, ratio, cpu, cpu_ratio, cached = row.values()
        print(f"{role:16}{wall:11.3f}{ratio:10.3f}{cpu:9.3f}{cpu_ratio:8.3f}{cached:10}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
