"""Runs the official OpenAI client for Python against a gateway: python3 check.py BASE_URL MODEL.

Prints a line for each check and ends with an error at the first answer that the client, or this script, does not accept.
"""

import json
import sys

import openai

base_url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url, api_key="test-key", max_retries=0, timeout=30)
messages = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name a river, and say where it ends."},
]
tools = [
    {
        "type": "function",
        "function": {
            "name": "river_length",
            "description": "The length of a river in kilometres.",
            "parameters": {
                "type": "object",
                "properties": {"river": {"type": "string"}, "exact": {"type": "boolean"}},
                "required": ["river"],
            },
        },
    }
]


def check(name, good, seen=None):
    if not good:
        sys.exit(f"FAILED {name}: {seen!r}")
    print(f"ok {name}")


listed = [m.id for m in client.models.list()]
check("models.list", model in listed and len(set(listed)) == len(listed), listed)
check("models.retrieve", client.models.retrieve(model).id == model)

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12)
check("chat", answer.choices[0].message.content and answer.choices[0].message.role == "assistant", answer)
check("chat usage", answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens <= 12, answer.usage)

chunks = list(
    client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
check("chat stream", text == answer.choices[0].message.content, text)
check("chat stream finish", [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("length", "stop"))
check("chat stream usage", chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens, chunks[-1])

called = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=64
)
call = called.choices[0].message.tool_calls[0]
check("tools", call.function.name == "river_length" and isinstance(json.loads(call.function.arguments), dict), call)
check("tools finish", called.choices[0].finish_reason == "tool_calls", called.choices[0].finish_reason)

name, arguments = "", ""
for chunk in client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=64, stream=True
):
    for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
        name += part.function.name or ""
        arguments += part.function.arguments or ""
check("tools stream", name == "river_length" and isinstance(json.loads(arguments), dict), (name, arguments))

followed = client.chat.completions.create(
    model=model,
    messages=messages
    + [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"km": 6650}'},
    ],
    tools=tools,
    max_tokens=8,
)
check("tool result", followed.choices[0].message.content, followed)

done = client.completions.create(model=model, prompt="Rivers run to", max_tokens=8)
check("completions", done.choices[0].text and done.usage.prompt_tokens > 0, done)
parts = list(client.completions.create(model=model, prompt="Rivers run to", max_tokens=8, stream=True))
check("completions stream", "".join(p.choices[0].text for p in parts if p.choices) == done.choices[0].text, parts)
many = client.completions.create(model=model, prompt=["Rivers", "Lakes"], max_tokens=4)
check("completions of two prompts", [c.index for c in many.choices] == [0, 1], many)
ids = client.completions.create(model=model, prompt=[1, 2, 3, 4, 5], max_tokens=4)
check("completions of token ids", ids.usage.prompt_tokens == 5, ids.usage)

try:
    client.chat.completions.create(model="no-such-model", messages=messages)
    check("unknown model", False, "no error")
except openai.NotFoundError as error:
    check("unknown model", "no-such-model" in str(error.message), error.message)
try:
    client.chat.completions.create(model=model, messages=messages, temperature=-3)
    check("engine's own error", False, "no error")
except openai.BadRequestError as error:
    check("engine's own error", error.status_code == 400, error)
