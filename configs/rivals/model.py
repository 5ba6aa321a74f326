"""The one model server of all: a script with a clock, by chat or by token ids, as vLLM speaks them.

`python model.py PORT LATENCIES` in prorl's own environment. Whoever plays, the script is the same:
each task begins with its number in square brackets, [17]; the policy has a shell compute
`x * 3 + turn` from the last number it saw, `CALLS` times, and then answers with the last number it
saw. So an answer is right exactly if every call ran once, in order, in a shell that worked, and its
output came back whole. How long a call takes is looked up in LATENCIES (seconds, a line each) by
task and turn: equal for everybody. `/calls` is every call so far: task, turn, when it came (Unix
time), how long it takes, and when it ended or null.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path

from aiohttp import web
from tokenizers import Tokenizer

TOY = Path(__file__).parents[2] / "prorl" / "assets" / "toy"
CALLS = 3
START = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "{}"}}}}\n</tool_call><|im_end|>'
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def last_number(text: str) -> int:
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else -1


class Model:
    def __init__(self, latencies: list[float]) -> None:
        self._latencies = latencies
        self._tokenizer = Tokenizer.from_file(str(TOY / "tokenizer.json"))
        self.calls: list[list[float | None]] = []
        """A row of `/calls` each. A caller that hangs up does not end its call."""

    async def _think(self, text: str, turn: int) -> None:
        task = int(re.findall(r"\[(\d+)\]", text)[0])
        takes_s = self._latencies[(task * (CALLS + 1) + turn) % len(self._latencies)]
        call = [task, turn, time.time(), takes_s, None]
        self.calls.append(call)
        await asyncio.sleep(takes_s)
        call[-1] = time.time()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        messages = body["messages"]
        texts = [content(message) for message in messages]
        turn = sum(message["role"] == "assistant" for message in messages)
        first = next(text for text in texts if re.search(r"\[\d+\]", text))
        await self._think(first, turn)
        seen = last_number(first) if turn == 0 else last_number(texts[-1])
        if turn < CALLS:
            command = f"echo $(({seen} * 3 + {turn}))"
        elif any(SUBMIT in text for text in texts):  # mini-swe-agent answers by a last command
            command = f"echo {SUBMIT} && echo {seen}"
        else:
            command = ""
        message: dict[str, object] = {
            "role": "assistant",
            "content": "" if command else f"#### {seen}",
        }
        if command:
            name = next((one["function"]["name"] for one in body.get("tools") or ()), "bash")
            made = {"name": name, "arguments": json.dumps({"command": command})}
            call = {"id": f"call_{len(self.calls)}", "type": "function", "function": made}
            message["tool_calls"] = [call]
        reason = "tool_calls" if command else "stop"
        head = {"id": f"chatcmpl-{len(self.calls)}", "created": int(time.time())}
        head |= {"model": body["model"]}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        if body.get("stream"):
            return await stream(request, head, message, reason, usage)
        choice = {"index": 0, "message": message, "finish_reason": reason}
        whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
        return web.json_response(head | whole)

    async def tokens(self, request: web.Request) -> web.Response:
        """vLLM's `/v1/completions` with ids both ways, one reply a call."""
        body = await request.json()
        prompt = body["prompt"]
        if body["max_tokens"] <= 1:  # prorl's probe of the logprobs' mode
            return self._said(
                body, [65], -0.001 if body.get("temperature", 1) < 1 else -1.0, "length"
            )
        await self._think(*self._read(prompt))
        return self._said(body, self._next(prompt), -0.1, "stop")

    def _read(self, prompt: list[int]) -> tuple[str, int]:
        """The text of a prompt, and which turn is next."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return text, text.count(START) - 1

    def _next(self, prompt: list[int]) -> list[int]:
        text, turn = self._read(prompt)
        told = text.rsplit("<|im_start|>user\n", 1)[1].rsplit(START, 1)[0]
        seen = last_number(re.sub(r"</?\w+>|<\|\w+\|>", "", told))
        said = (
            CALL.format(f"echo $(({seen} * 3 + {turn}))")
            if turn < CALLS
            else f"#### {seen}<|im_end|>"
        )
        return self._tokenizer.encode(said, add_special_tokens=False).ids

    async def generate(self, request: web.Request) -> web.Response:
        """vLLM's `/inference/v1/generate`, as SkyRL's client asks."""
        body = await request.json()
        ids = self._next(body["token_ids"])
        await self._think(*self._read(body["token_ids"]))
        content = [{"logprob": -0.1}] * len(ids)
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice]})

    def _said(self, body: dict, ids: list[int], logprob: float, reason: str) -> web.Response:
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(ids, skip_special_tokens=False),
            "token_ids": ids,
            "logprobs": {"token_logprobs": [logprob] * len(ids)},
            "finish_reason": reason,
        }
        prompt = len(body["prompt"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "total_tokens": prompt + len(ids),
        }
        head = {"id": f"cmpl-{body.get('request_id', 'x')}", "model": body["model"], "created": 1}
        return web.json_response(
            {**head, "object": "text_completion", "choices": [choice], "usage": usage}
        )


async def stream(
    request: web.Request, head: dict, message: dict, reason: str, usage: dict
) -> web.StreamResponse:
    """A reply as events: all that was said in one, why it ended, and what was used."""
    calls = [{"index": at, **call} for at, call in enumerate(message.pop("tool_calls", ()))]
    delta = message | ({"tool_calls": calls} if calls else {})
    chunk = head | {"object": "chat.completion.chunk"}
    chunks = [
        chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        chunk | {"choices": [], "usage": usage},
    ]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    events = [json.dumps(one) for one in chunks] + ["[DONE]"]
    await response.write("".join(f"data: {event}\n\n" for event in events).encode())
    await response.write_eof()
    return response


def content(message: dict) -> str:
    said = message.get("content") or ""
    return said if isinstance(said, str) else "".join(part.get("text", "") for part in said)


async def main(port: int, latencies: Path) -> None:
    model = Model([float(line) for line in latencies.read_text().split()])
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    listed = {
        "object": "list",
        "data": [{"id": "policy", "object": "model", "max_model_len": 1 << 20}],
    }
    app.router.add_get("/v1/models", lambda _: asyncio.sleep(0, web.json_response(listed)))
    weights = {"weight_version": "default"}
    app.router.add_get("/weight_info", lambda _: asyncio.sleep(0, web.json_response(weights)))
    app.router.add_post("/v1/chat/completions", model.chat)
    app.router.add_post("/v1/completions", model.tokens)
    app.router.add_post("/inference/v1/generate", model.generate)
    app.router.add_get("/calls", lambda _: asyncio.sleep(0, web.json_response(model.calls)))
    app.router.add_post("/finish_session", lambda _: asyncio.sleep(0, web.Response()))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, backlog=1024).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
