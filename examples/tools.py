"""Has a model call a tool, runs it, and asks for the answer, with the official OpenAI client (pip install openai).

python examples/tools.py     OPENAI_BASE_URL=http://host:port/v1, default http://127.0.0.1:8000/v1
"""

import json
import os

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of the next days",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


def weather(city: str, days: int) -> str:
    return f"{city}: sun for {days} days"


def main() -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    client = openai.OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    # "required" works with every model, also one that was never taught to call tools.
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=128
    )
    messages.append(asked.choices[0].message)
    for call in asked.choices[0].message.tool_calls or ():
        result = weather(**json.loads(call.function.arguments))
        print(f"called: {call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=32
    )
    print(f"answered: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
