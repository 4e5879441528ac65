"""Bodies of requests to Ollama's API, which its documentation and clients send without a content-type of JSON."""

from __future__ import annotations

from functools import partial

from cllm.server.schema.body import json_body

ollama_body = partial(json_body, of_any_type=True)
