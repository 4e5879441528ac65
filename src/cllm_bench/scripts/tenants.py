"""What a thousand keys with a cache space each cost a request, against one key.

    python src/cllm_bench/scripts/tenants.py --json tenants.json

Three servers get the same requests in turn, one at a time: one key, a thousand keys, and one key again, which shows how
much of a difference is noise: two processes of the same server differ by some percent. So all three are started anew
for every repeat, and what counts is the median of the thousand keys against the mean of the others.

The fake backend computes nothing, so that whatever cLLM does around it weighs most; `--backend native` takes a real
model. Every user has a prompt of its own and comes back to it, so that all servers find the same in their caches. Wall
time is the client's, CPU time the server process's.
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

from cllm.server.auth.key_file import KeyFile, NamedKey, digest, new_salt

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
    memory = f"resources.kv_cache_max_memory_mb={args.kv_mb}"
    for setting in ("log.level=warning", "kv.disk.enabled=false", memory, *settings):
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


def measure(sides: list[Side], args: argparse.Namespace) -> dict[str, list[float]]:
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
    if len({side.cached for side in sides}) > 1:
        raise SystemExit(f"they did not find the same in their caches: {[side.cached for side in sides]}")
    wall = [median(side.seconds) * 1e3 for side in sides]
    return {"wall_ms": wall, "cpu_ms": [each / args.requests * 1e3 for each in cpu]}


def against(times: list[float]) -> float:
    one, many, again = times
    return many * 2 / (one + again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fake")
    parser.add_argument("--kv-mb", type=float, default=8, help="a token of the fake backend takes 8 bytes")
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--prompt", type=int, default=512, help="characters of a user's own prompt")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    repeats: list[dict[str, list[float]]] = []
    print(f"{'':12}" + "".join(f"{role:>16}" for role in ROLES) + f"{'many : one':>12}{'noise':>8}")
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            file = Path(folder) / "keys.json"
            one, many = (["one"], ["server.api_key=one"]), (write_keys(file, args.keys), [f"server.api_keys={file}"])
            sides = [stack.enter_context(serving(args, *way)) for way in (one, many, one)]
            repeats.append(measure(sides, args))
        for name, times in repeats[-1].items():
            ratio, noise = against(times), times[2] / times[0]
            print(f"{name:12}" + "".join(f"{each:16.3f}" for each in times) + f"{ratio:12.3f}{noise:8.3f}", flush=True)
    result = {name: median(against(repeat[name]) for repeat in repeats) for name in repeats[0]}
    print(", ".join(f"{name} {ratio:.3f}" for name, ratio in result.items()))
    if args.json:
        args.json.write_text(json.dumps({"ratios": result, "repeats": repeats}, indent=2))


if __name__ == "__main__":
    main()
