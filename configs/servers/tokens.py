"""A model server of one's own, whole: token ids in, token ids and their log-probabilities out.

    python configs/servers/tokens.py 8100
    prorl run --policy http://127.0.0.1:8100 --set service.tokenizer=bytes --tasks tasks.jsonl

The model is a table: each token of its 265 depends on the one before it. Put your engine in the
place of `Table`, and its model's directory in the place of `bytes`. prorl asks `GET /health`,
`GET /v1/models`, and `POST /v1/completions`, a subset of vLLM's: `prompt` (ids), `max_tokens`,
`temperature`, `top_k`, `top_p`, `seed`, `stop_token_ids`, `request_id`, `stream`. Before it trusts
a server it tries at two temperatures whether the log-probabilities are those of the distribution
that was sampled from.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCAB_SIZE = 265
"""Of the byte tokenizer (`service.tokenizer: bytes`): 256 bytes and ChatML's markers."""
MAX_BODY_BYTES = 32 << 20


class Table:
    """A model: logits of the next token, by the last one."""

    def __init__(self) -> None:
        self._logits = np.random.default_rng(7).normal(0.0, 3.0, (VOCAB_SIZE, VOCAB_SIZE))

    def logits(self, ids: list[int]) -> Any:
        return self._logits[ids[-1]]


def sample(model: Table, request: dict[str, Any]) -> tuple[list[int], list[float], str]:
    """Sampled ids, the log-probability of each, and why it ended."""
    random = np.random.default_rng(request.get("seed"))
    ids, sampled, logprobs = list(request["prompt"]), list[int](), list[float]()
    stops = set(request.get("stop_token_ids") or ())
    while len(sampled) < request.get("max_tokens", 16):
        logits = model.logits(ids) / max(request.get("temperature", 1.0), 1e-3)
        top_k = request.get("top_k") or 0
        if 0 < top_k < VOCAB_SIZE:
            logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
        logits = logits - logits.max()
        log_softmax = logits - np.log(np.exp(logits).sum())
        top_p = request.get("top_p", 1.0)
        if top_p < 1.0:
            order = np.argsort(log_softmax)[::-1]
            kept = order[: 1 + int(np.searchsorted(np.cumsum(np.exp(log_softmax[order])), top_p))]
            masked = np.full(VOCAB_SIZE, -np.inf)
            masked[kept] = log_softmax[kept]
            log_softmax = masked - np.log(np.exp(masked).sum())
        token = int(np.argmax(log_softmax + random.gumbel(size=VOCAB_SIZE)))
        ids.append(token)
        sampled.append(token)
        logprobs.append(min(float(log_softmax[token]), 0.0))
        if token in stops:
            return sampled, logprobs, "stop"
    return sampled, logprobs, "length"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = Table()

    def do_GET(self) -> None:
        replies = {
            "/health": {},
            "/v1/models": {"data": [{"id": "table", "max_model_len": 1 << 20}]},
        }
        self._reply(200 if self.path in replies else 404, replies.get(self.path, {}))

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if self.path != "/v1/completions" or size > MAX_BODY_BYTES:
            self._reply(404, {"message": f"no {self.path}"})
            return
        request = json.loads(self.rfile.read(size))
        ids, logprobs, finish = sample(self.model, request)
        usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": len(ids)}
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": finish,
        }
        name = f"cmpl-{request.get('request_id', '')}"
        body = {"id": name, "created": int(time.time()), "model": "table", "usage": usage}
        if request.get("stream"):
            self._stream(body | {"choices": [choice]})
        else:
            self._reply(200, body | {"choices": [choice]})

    def _stream(self, body: dict[str, Any]) -> None:
        """One event with all tokens; a real engine sends one for each few tokens."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
