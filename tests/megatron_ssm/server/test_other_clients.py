"""Clients as their users install them, each in an environment of its own. Oracle: the replies to bare requests."""

import json
import subprocess

import httpx
import pytest
from environments import python_with

from servers import LIMIT_S, server, with_template

TOOL = {
    "type": "function",
    "function": {
        "name": "draw", "description": "Draw a circle.",
        "parameters": {
            "type": "object", "properties": {"size": {"type": "integer", "maximum": 99}}, "required": ["size"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
FORCED = {"type": "function", "function": {"name": "draw"}}
CHAT = {"model": "mamba2", "messages": [{"role": "user", "content": "Draw."}], "temperature": 0, "max_tokens": 24}
MOST = 400  # tokens of a reply that calls a tool

# {package: a program that prints the reply to CHAT, the same as a stream, and the arguments of a forced call}
PROGRAMS = {
    "langchain-openai": """
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="mamba2", base_url=url, api_key="none", temperature=0, max_tokens=24)
reply = model.invoke("Draw.").content
stream = "".join(part.content for part in model.stream("Draw."))
calling = model.bind_tools([TOOL], tool_choice="draw").bind(max_tokens=MOST)
call = calling.invoke("Draw.").tool_calls[0]["args"]
""",
    "litellm": """
import litellm

chat = CHAT | {"model": "openai/mamba2", "api_base": url, "api_key": "none"}
reply = litellm.completion(**chat).choices[0].message.content
stream = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**chat, stream=True))
called = litellm.completion(**(chat | {"max_tokens": MOST}), tools=[TOOL], tool_choice=FORCED)
call = json.loads(called.choices[0].message.tool_calls[0].function.arguments)
""",
    "llama-index-llms-openai-like": """
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

def draw(size: int) -> str:
    return "done"

model = OpenAILike(model="mamba2", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
                   temperature=0, max_tokens=24)
messages = [ChatMessage(role="user", content="Draw.")]
reply = model.chat(messages).message.content
stream = "".join(part.delta or "" for part in model.stream_chat(messages))
model.max_tokens = MOST
called = model.chat_with_tools([FunctionTool.from_defaults(draw)], user_msg="Draw.", tool_choice="draw")
call = model.get_tool_calls_from_response(called)[0].tool_kwargs
""",
    "openai-agents": """
import asyncio
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel("mamba2", AsyncOpenAI(base_url=url, api_key="none"))
plain = Agent("plain", model=model, model_settings=ModelSettings(temperature=0, max_tokens=24))
calls = []

@function_tool
def draw(size: int) -> str:
    calls.append({"size": size})
    return "done"

async def run():
    reply = (await Runner.run(plain, "Draw.")).final_output
    raw = [each.data async for each in Runner.run_streamed(plain, "Draw.").stream_events()
           if each.type == "raw_response_event"]
    stream = "".join(each.delta for each in raw if each.type == "response.output_text.delta")
    settings = ModelSettings(temperature=0, max_tokens=MOST, tool_choice="draw")
    painter = Agent("painter", model=model, model_settings=settings, tools=[draw])
    answer = (await Runner.run(painter, "Draw.")).final_output  # the second turn, with the tool's result
    assert isinstance(answer, str)
    return reply, stream

reply, stream = asyncio.run(run())
(call,) = calls
""",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with server(with_template("mamba2"), tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.mark.full
@pytest.mark.parametrize("package", PROGRAMS)
def test_client(package, running, tmp_path):
    python = python_with(tmp_path / "venv", package)
    names = {"CHAT": CHAT, "TOOL": TOOL, "FORCED": FORCED, "MOST": MOST, "url": running.url + "/v1"}
    said = "print(json.dumps([reply, stream, call]))"
    program = f"import json\nglobals().update({names!r})\n{PROGRAMS[package]}\n{said}"
    done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S * 3)
    reply, stream, call = json.loads(done.stdout.splitlines()[-1])
    bare = httpx.post(running.url + "/v1/chat/completions", json=CHAT, timeout=LIMIT_S).json()
    assert reply == stream == bare["choices"][0]["message"]["content"]
    assert call.keys() == {"size"} and isinstance(call["size"], int)
