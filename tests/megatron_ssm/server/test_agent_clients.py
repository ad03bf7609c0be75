"""Agents as their users install them, with a tool and a schema of the answer at once. Oracle: the model's script."""

import json
import os
import subprocess

import pytest
from environments import python_with
from scripted import save_script

from servers import LIMIT_S, server

ANSWER = {"city": "Paris", "degrees": 21}
QUESTION = "How warm is it in Paris?"

BEGIN = """
import json
from pydantic import BaseModel

class Answer(BaseModel):
    city: str
    degrees: int

calls = []

def weather(city: str) -> str:
    '''The weather in a city.'''
    calls.append(city)
    return "21 degrees"
"""
END = "print(json.dumps([calls, answer.model_dump()]))"

# {name: (packages, a program whose agent may call `weather`, and which sets `answer` to an Answer)}
AGENTS = {
    "pydantic-ai, chat": (["pydantic-ai-slim[openai]"], """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=url, api_key="none"))
answer = Agent(model, output_type=NativeOutput(Answer), tools=[weather]).run_sync(QUESTION).output
"""),
    "LangGraph": (["langchain", "langgraph", "langchain-openai"], """
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="scripted", base_url=url, api_key="none")
graph = create_agent(model, [weather], response_format=ProviderStrategy(Answer))
answer = graph.invoke({"messages": [("user", QUESTION)]})["structured_response"]
"""),
    "openai-agents, Responses": (["openai-agents"], """
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
model = OpenAIResponsesModel("scripted", AsyncOpenAI(base_url=url, api_key="none"))
agent = Agent("agent", model=model, output_type=Answer, tools=[function_tool(weather)])
answer = Runner.run_sync(agent, QUESTION).final_output
"""),
    "instructor": (["instructor"], """
import instructor
from openai import OpenAI

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
create = client.chat.completions.create
messages = [{"role": "user", "content": QUESTION}]
said = create(model="scripted", messages=messages, tools=tools, response_model=None).choices[0].message
(call,) = said.tool_calls
result = weather(**json.loads(call.function.arguments))
messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
answer = create(model="scripted", messages=messages, tools=tools, response_model=Answer)
"""),
    "AutoGen": (["autogen-agentchat", "autogen-ext[openai]"], """
import asyncio
from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

info = dict(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")
model = OpenAIChatCompletionClient(model="scripted", base_url=url, api_key="none", model_info=info)
tool = FunctionTool(weather, "The weather in a city.", strict=True)
agent = AssistantAgent("agent", model, tools=[tool], output_content_type=Answer)
answer = asyncio.run(agent.run(task=QUESTION)).messages[-1].content
"""),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server whose model asks for the weather and then answers."""
    directory = tmp_path_factory.mktemp("server") / "scripted"
    save_script(directory, ("weather", {"city": "Paris"}), "21 degrees", json.dumps(ANSWER))
    with server(directory, directory.with_name("log")) as running:
        yield running.url + "/v1"


@pytest.mark.full
@pytest.mark.parametrize("name", AGENTS)
def test_a_tool_and_a_schema_at_once(name, url, tmp_path):
    packages, program = AGENTS[name]
    python = python_with(tmp_path / "venv", *packages)
    whole = f"{BEGIN}\nurl, QUESTION = {url!r}, {QUESTION!r}\n{program}\n{END}"
    done = subprocess.run([python, "-c", whole], stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S * 3)
    assert json.loads(done.stdout.splitlines()[-1]) == [["Paris"], ANSWER]


@pytest.mark.full
def test_codex_runs_a_command(tmp_path):
    """`codex exec` runs the model's command, sends back what it printed, and shows the model's answer."""
    python = python_with(tmp_path / "venv", "openai-codex")
    find = "import codex_cli_bin; print(codex_cli_bin.bundled_codex_path())"
    codex = subprocess.run([python, "-c", find], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    directory = tmp_path / "scripted"
    save_script(directory, ("exec_command", {"cmd": "echo $((6 * 7)) apples"}), "42 apples", "There are 42 apples.")
    with server(directory, tmp_path / "log", "--max-length", 10**5) as running:
        provider = f'name = "local"\nbase_url = "{running.url}/v1"\nwire_api = "responses"\n'
        config = f'model = "scripted"\nmodel_provider = "local"\n[model_providers.local]\n{provider}'
        (home / "config.toml").write_text(config)
        # Nothing listens at the proxy's port, so the server is all that can be reached.
        environment = os.environ | {
            "CODEX_HOME": str(home),
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
        }
        command = [codex, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        done = subprocess.run(
            [*command, "How many apples are there?"], cwd=work, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S,
        )  # fmt: skip
    events = map(json.loads, done.stdout.splitlines())
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (run,) = (item for item in items if item["type"] == "command_execution")
    assert run["aggregated_output"] == "42 apples\n" and run["exit_code"] == 0
    assert items[-1]["type"] == "agent_message" and items[-1]["text"] == "There are 42 apples."
