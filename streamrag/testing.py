"""Parts for tests and demonstrations: exact, instant, able to fail on purpose; and a tiny model for the real engine.

    source = ScriptedSource([Append(Chunk("Paris is in France.", "geo.md"))])
    backend = ScriptedBackend(answer="In France.")
    async with Pipeline(source, backend) as pipeline:
        print("".join([chunk.text async for chunk in pipeline.stream("Where is Paris?")]))
    assert backend.prompts[-1][-1].is_complete  # every prompt of every query is kept

`make_tiny_llama` writes a Llama with random weights for `VllmBackend`; its answers are noise.
`make_demo_model` writes a small model that answers in English, from two packages that carry it. `StretchedSource` is
another source, slowed down.
"""

from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.demo.scripted import ScriptedBackend, ScriptedSource, Step
from streamrag.demo.smollm2 import make_demo_model
from streamrag.demo.tiny_llama import make_tiny_llama
from streamrag.sources.stretch import StretchedSource

__all__ = [
    "CodePointTokenizer",
    "ScriptedBackend",
    "ScriptedSource",
    "Step",
    "StretchedSource",
    "make_demo_model",
    "make_tiny_llama",
]
