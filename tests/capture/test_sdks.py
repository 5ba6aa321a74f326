"""The official clients as referees: they read every event of every dialect."""

from __future__ import annotations

import asyncio
import json

import pytest

from prorl.testing import Replies
from prorl.types import Json, Message, ToolCall
from tests.capture.test_model_endpoint import Open, opened

CALL = Message(
    role="assistant",
    content="I look.",
    reasoning="Where is it?",
    tool_calls=(ToolCall("bash", {"command": "ls"}),),
)
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


async def chat(at: Open, stream: bool) -> str:
    openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
    async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="k", max_retries=0) as client:
        tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
        history: list[Json] = [{"role": "user", "content": "Fix it."}]
        while True:
            if stream:
                async with client.chat.completions.stream(
                    model="m", messages=history, tools=tools
                ) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(
                    model="m", messages=history, tools=tools
                )
            message = answer.choices[0].message
            if not message.tool_calls:
                return str(message.content)
            history.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"command": "ls"}
                history.append({"role": "tool", "tool_call_id": call.id, "content": "a.py"})


async def responses(at: Open, stream: bool) -> str:
    openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
    async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="k", max_retries=0) as client:
        tools = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
        history: list[Json] = [{"role": "user", "content": "Fix it."}]
        while True:
            if stream:
                async with client.responses.stream(model="m", input=history, tools=tools) as events:
                    async for _ in events:
                        pass
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(model="m", input=history, tools=tools)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return str(answer.output_text)
            history += [item.model_dump(exclude_none=True) for item in answer.output]
            for call in calls:
                assert json.loads(call.arguments) == {"command": "ls"}
                output = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
                history.append(output)


async def messages(at: Open, stream: bool) -> str:
    anthropic = pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")
    async with anthropic.AsyncAnthropic(base_url=at.url, api_key="k", max_retries=0) as client:
        tools = [{"name": "bash", "input_schema": SCHEMA}]
        history: list[Json] = [{"role": "user", "content": "Fix it."}]
        while True:
            params = {"model": "m", "max_tokens": 500, "messages": history, "tools": tools}
            if stream:
                async with client.messages.stream(**params) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**params)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return str(answer.content[-1].text)
            history.append(
                {"role": "assistant", "content": [b.model_dump() for b in answer.content]}
            )
            assert all(call.input == {"command": "ls"} for call in calls)
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "a.py"} for call in calls
            ]
            history.append({"role": "user", "content": results})


async def gemini(at: Open, stream: bool) -> str:
    genai = pytest.importorskip("google.genai", reason="the Gemini SDK is not installed")
    types = genai.types
    client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=at.url)).aio
    tool = types.FunctionDeclaration(name="bash", parameters=types.Schema(**GEMINI))
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[tool])], system_instruction="You mend."
    )
    contents = [types.Content(role="user", parts=[types.Part.from_text(text="Fix it.")])]
    while True:
        parts = list[Json]()
        if stream:
            async for chunk in await client.models.generate_content_stream(
                model="m", contents=contents, config=config
            ):
                parts += chunk.candidates[0].content.parts
        else:
            answer = await client.models.generate_content(
                model="m", contents=contents, config=config
            )
            parts += answer.candidates[0].content.parts
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            await client.aclose()
            return str(parts[-1].text)
        contents.append(types.Content(role="model", parts=parts))
        for call in calls:
            assert call.args == {"command": "ls"}
            result = types.FunctionResponse(id=call.id, name=call.name, response={"output": "a.py"})
            part = types.Part(function_response=result)
            contents.append(types.Content(role="user", parts=[part]))


GEMINI: Json = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}}
SDKS = {chat: "openai", responses: "openai", messages: "anthropic", gemini: "google.genai"}


@pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")  # Gemini's SDK
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", SDKS)
async def test_a_loop_of_an_official_client_is_a_single_sequence(
    client: Json, stream: bool
) -> None:
    pytest.importorskip(SDKS[client], reason="no SDK is installed")
    async with opened(Replies(CALL, CALL, "done")) as at:
        async with asyncio.timeout(60):
            assert await client(at, stream) == "done"
    (sequence,) = at.sampler.record.sequences
    assert sequence.weight == 1.0
    assert len(at.sampler.record.turns) == 3
    assert at.endpoint.counts["continued_calls"] == 2
    assert at.endpoint.counts["edited_replies"] == 0
