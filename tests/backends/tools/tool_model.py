"""A tiny Llama whose chat template renders tools, and a backend that answers from a script."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Prompt, SamplingParams
from streamrag.testing import ScriptedBackend, make_tiny_llama

HERMES = """{{ bos_token }}
{%- if tools %}<|start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools>

For each call, return a JSON object with its name and arguments within <tool_call></tool_call>.<|end|>
{% elif messages[0].role == 'system' %}<|start|>system
{{ messages[0].content }}<|end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start|>user
<tool_response>
{{ message.content }}
</tool_response><|end|>
{% elif message.role != 'system' or not loop.first %}<|start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}{{ '\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
"""As those of Qwen 2.5 and Hermes."""

LLAMA = """{{ bos_token }}<|start|>system
{{ messages[0].content | trim }}<|end|>
{% for message in messages[1:] %}
{%- if loop.first and tools %}<|start|>user
Given the following functions, respond with JSON:
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ message.content | trim }}<|end|>
{% elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool-call at once') }}{% endif %}<|start|>assistant
{% set function = message.tool_calls[0].function -%}
{"name": "{{ function.name }}", "parameters": {{ function.arguments | tojson }}}<|end|>
{% elif message.role == 'tool' %}<|start|>ipython
{{ message.content | tojson }}<|end|>
{% else %}<|start|>{{ message.role }}
{{ message.content | trim }}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
"""As that of Llama 3.1: tools in the first user's message, indented; results as JSON."""

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + HERMES
"""As those of Gemma, which refuse system texts."""

MISTRAL = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {#
#}{% if loop.last and system is defined %}{{ system }}{{ '\n\n' }}{% endif %}{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] {{ message.tool_calls | tojson }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- else %} {{ message.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""
"""As that of Mistral 7B v0.3, which moves system texts to the last user message."""

Script = Callable[[str, SamplingParams], str]
"""A function that returns the answer to a prompt."""


def make_tool_llama(folder: Path, template: str = HERMES, **options: Any) -> Path:
    make_tiny_llama(folder, **options)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


class ToolBackend(ScriptedBackend):
    """Answers a prompt from a script, one character per piece, and records the parameters too."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__()
        self.model = ModelInfo("scripted", HuggingFaceTokenizer(folder), 100_000)
        self.params: list[SamplingParams] = []
        self._script = script

    @property
    def texts(self) -> list[str]:
        """The complete prompts."""
        return [self.model.tokenizer.decode(prompts[-1].token_ids) for prompts in self.prompts if prompts]

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        received: list[Prompt] = []
        self.prompts.append(received)
        self.params.append(params)
        async for prompt in prompts:
            received.append(prompt)
            yield Prefilled(len(prompt.token_ids))
        whole = self._script(self.texts[-1], params)
        answer = whole[: params.max_tokens]
        for i, character in enumerate(answer, 1):
            reason = ("stop" if answer == whole else "length") if i == len(answer) else None
            yield AnswerChunk(character, tuple(self.model.tokenizer.encode(character)), reason)


def call(name: str, **arguments: Any) -> str:
    """Return a call as a model writes it for the parser hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
