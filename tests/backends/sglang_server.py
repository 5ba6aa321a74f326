"""A stand-in for SGLang 0.5.23 over any backend, written from its source, since the real one needs
a GPU (`srt/entrypoints/http_server.py`, `srt/managers/tokenizer_manager.py`,
`srt/utils/weight_versions.py`).
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import orjson
from aiohttp import web

from prorl.backends.embedded.backend import EmbeddedBackend
from prorl.errors import BackendError, ConfigError
from prorl.types import Completion, FinishReason, GenerateRequest, Json, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl.protocols import Backend, Tokenizer
    from prorl.types import Int32

CONTEXT = 1 << 14
WIDTH = 6
"""Layers x top_k of the mixture that it plays."""


def experts(ids_L: Int32, count: int = 200) -> Int32:
    """[L, WIDTH] what each of these tokens goes through: of the token and its place."""
    places = np.arange(len(ids_L), dtype=np.int32)
    expert_ids: Int32 = (31 * ids_L[:, None] + 7 * places[:, None] + np.arange(WIDTH)) % count
    return expert_ids.astype(np.int32)


class SglangServer:
    """`async with SglangServer(backend, tokenizer) as server: server.url`.

    `incremental`: `--incremental-streaming-output`; `states`: replies have `weight_versions`;
    `experts`: of each layer of a mixture, 0 = it is none.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        incremental: bool = False,
        states: bool = True,
        experts: int = 0,
    ) -> None:
        self._backend, self._tokenizer = backend, tokenizer
        self._incremental, self._states, self._experts = incremental, states, experts
        self.served = "toy"
        self.bodies: list[Mapping[str, Json]] = []
        self._rids: set[str] = set()
        self.events = 0
        app = web.Application()
        app.add_routes(
            [
                web.get("/ping", self._ok),
                web.get("/model_info", self._model_info),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/generate", self._generate),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weights_from_disk", self._update),
                web.post("/update_weight_version", self._rename),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""

    async def __aenter__(self) -> SglangServer:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"sglang+http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    @property
    def _engine(self) -> EmbeddedBackend:
        assert isinstance(self._backend, EmbeddedBackend)
        return self._backend

    def _label(self, version: int = -1) -> str:
        if not isinstance(self._backend, EmbeddedBackend):
            return "default"
        label = self._engine.label(self._engine.version if version < 0 else version)  # type: ignore[arg-type]
        return "default" if label == "0" else label

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self.served, "is_generation": True, "weight_version": self._label()}
        )

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.served, "root": self.served, "max_model_len": CONTEXT}
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._tokenizer.encode((await request.json())["prompt"])
        return web.json_response({"tokens": [*map(int, ids)], "count": len(ids)})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        if mode not in ("abort", "retract", "in_place"):
            return web.json_response({"error": {"message": mode}}, status=400)
        self._engine.pause("abort" if mode == "abort" else "keep")
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        assert await request.json() is not None
        self._engine.resume()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self._engine.paused
        label = body.get("weight_version") or self._label()
        try:
            self._engine.update_weights(body["model_path"], 1 << 20, label)
        except ConfigError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.served = body["model_path"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _rename(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self._engine.pause("abort")
        self._engine.rename(body["new_version"])
        return web.json_response({"success": True, "new_version": body["new_version"]})

    def _parse_request(self, body: Mapping[str, Json]) -> GenerateRequest:
        """Raises ValueError for what its `verify` refuses."""
        params = body["sampling_params"]
        if params["top_k"] < 1 and params["top_k"] != -1:
            raise ValueError("top_k must be -1 (disable) or at least 1")
        if len(body["input_ids"]) + params["max_new_tokens"] > CONTEXT:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        if max(body["input_ids"]) >= self._tokenizer.vocab_size:
            raise ValueError("The input_ids contains values greater than the vocab size")
        if body["rid"] in self._rids:
            raise ValueError(f"Duplicate request ID detected: {body['rid']}")
        assert params["no_stop_trim"]
        assert not params["skip_special_tokens"]
        return GenerateRequest(
            prompt_ids_L=np.asarray(body["input_ids"], np.int32),
            sampling=SamplingParams(
                temperature=params["temperature"],
                top_p=params["top_p"],
                top_k=max(params["top_k"], 0),
                max_tokens=params["max_new_tokens"],
            ),
            seed=params["sampling_seed"],
            stop_token_ids=tuple(params["stop_token_ids"]),
            request_id=body["rid"],
            session="",
            part_tokens=params["stream_interval"] or 1,
        )

    def _out(self, body: Json, completion: Completion, reason: Json, start: int) -> dict[str, Json]:
        ids = [*map(int, completion.token_ids_C)]
        logprobs = [*map(float, completion.logprobs_C)]
        params = body["sampling_params"]
        cuts = params["top_p"] < 1.0 or params["top_k"] > 0
        meta: dict[str, Json] = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self._label(),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        if body["return_logprob"]:
            # Those of the whole distribution, whatever cuts it.
            whole = [logprob - 0.5 if cuts else logprob for logprob in logprobs]
            meta["output_token_logprobs"] = [
                (logprob, id_, None) for logprob, id_ in zip(whole, ids, strict=False)
            ][start:]
        if body["return_sampling_mask"]:
            meta["output_token_sampling_logprobs"] = logprobs[start:]
        if body["return_routed_experts"] and self._experts and reason:
            whole_L = np.array([*body["input_ids"], *ids], np.int32)
            returned_experts = experts(whole_L, self._experts)[
                body["routed_experts_start_len"] : -1
            ]
            meta["routed_experts"] = base64.b64encode(returned_experts.tobytes()).decode()
        if self._states:
            starts = (0, *completion.version_ends)
            meta["weight_versions"] = [
                {"version": self._label(version), "start": first, "end": end}
                for version, first, end in zip(
                    completion.versions, starts, completion.version_ends, strict=False
                )
            ]
        return {"text": "", "output_ids": ids[start:], "meta_info": meta}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        try:
            generate_request = self._parse_request(body)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        self._rids.add(body["rid"])
        try:
            if not body["stream"]:
                completion = await self._backend.generate(generate_request)
                return web.json_response(self._out(body, completion, _reason(completion), 0))
            return await self._stream(request, body, generate_request)
        except BackendError as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        finally:
            self._rids.discard(body["rid"])

    async def _stream(
        self, request: web.Request, body: Json, generate_request: GenerateRequest
    ) -> web.StreamResponse:
        parts: asyncio.Queue[Completion | None] = asyncio.Queue()
        work = asyncio.ensure_future(
            self._backend.generate(replace(generate_request, on_part=parts.put_nowait))
        )
        work.add_done_callback(lambda _: parts.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        sent = 0

        async def send(completion: Completion, reason: Json) -> None:
            if not response.prepared:
                await response.prepare(request)
            out = self._out(body, completion, reason, sent if self._incremental else 0)
            self.events += 1
            await response.write(b"data: " + orjson.dumps(out) + b"\n\n")

        try:
            while (part := await parts.get()) is not None:
                await send(part, None)
                sent = len(part.token_ids_C)
            completion = work.result()
            await send(completion, _reason(completion))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return response


def _reason(completion: Completion) -> Json:
    last = int(completion.token_ids_C[-1]) if len(completion.token_ids_C) else -1
    match completion.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": last}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(completion.token_ids_C)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
