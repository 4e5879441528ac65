"""The peers by name. The address of any OpenAI-compatible server is one, too."""

from __future__ import annotations

from collections.abc import Sequence

from cllm_bench.errors import BenchError
from cllm_bench.peers.base import Peer
from cllm_bench.peers.llama_cpp_python import LlamaCppPython
from cllm_bench.peers.llama_server import LlamaServer
from cllm_bench.peers.openvino import OpenVino

PEERS: dict[str, Peer] = {peer.name: peer for peer in (LlamaServer(), OpenVino(), LlamaCppPython())}


def check(names: Sequence[str], *, must_run: bool) -> tuple[str, ...]:
    """The peers to run beside us, known and installed; `none` is nobody."""
    wanted = tuple(dict.fromkeys(name for name in names if name != "none"))
    for name in wanted:
        if "://" in name:
            continue
        if name not in PEERS:
            raise BenchError(
                f"--against is {name!r}; it must be {', '.join(PEERS)}, none or an address such as http://127.0.0.1:8000"
            )
        if must_run:
            PEERS[name].require()
    return wanted
