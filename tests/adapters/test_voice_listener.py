"""What the adapters for voice frameworks share, without any framework."""

import asyncio
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from streamrag import Append, Chunk, ConfigurationError, MissingDependencyError, Pipeline, Turn
from streamrag.adapters.voice_listener import VoiceListener, parse_messages
from streamrag.open_questions import ListenOptions, WaitForWords
from streamrag.testing import ScriptedBackend, ScriptedSource

PAGE = Append(Chunk("A task group is cancelled by its scope.", "tasks.md"))
GREETED = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hello!")]
AT_ONCE: ListenOptions = {"rule": WaitForWords(settle_s=0, pause_s=0)}


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_the_last_message_of_the_user_is_the_question_and_the_others_are_options() -> None:
    answered = [*GREETED, ("developer", "Use no lists."), ("user", "Why?"), ("assistant", "Because"), ("tool", "{}")]
    assert parse_messages([*answered, ("user", " "), ("assistant", "")]) == (
        "Why?",
        {
            "system": "Be brief.\n\nUse no lists.",
            "history": [Turn("user", "Hello"), Turn("assistant", "Hello!"), Turn("assistant", "Because")],
        },
    )
    assert parse_messages([("user", "Why?")]) == ("Why?", {"history": []})
    with pytest.raises(ConfigurationError, match=r"no message of its user.*session\.say.*TTSSpeakFrame"):
        parse_messages([("system", "Greet the caller."), ("assistant", "Hello!")])


async def test_a_committed_question_goes_on_if_text_and_conversation_are_those_that_were_heard() -> None:
    source, backend = ScriptedSource([PAGE]), ScriptedBackend("By its scope.")
    async with Pipeline(source, backend) as pipeline:
        for messages, before, after in ((GREETED, 1, 1), (GREETED[1:], 2, 3), ([("system", "Sing."), *GREETED], 4, 5)):
            listener = VoiceListener(pipeline, AT_ONCE)
            await listener.hear("cancel a task", GREETED)
            await until(lambda before=before: len(source.queries) == before)
            async with listener.answer([*messages, ("user", "cancel a task")]) as answer:
                assert "".join([chunk.text async for chunk in answer]) == "By its scope."
            assert (len(source.queries), backend.num_requests, pipeline.num_queries) == (after, 0, 0)


async def test_a_conversation_that_changes_begins_a_new_question() -> None:
    """As when the user interrupts: the part of the answer that was spoken becomes a message."""
    source = ScriptedSource([PAGE])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        listener = VoiceListener(pipeline, AT_ONCE)
        await listener.hear("cancel a task", GREETED[:2])
        await until(lambda: source.queries)
        await listener.hear("cancel a task", GREETED)
        await until(lambda: len(source.queries) == 2 and source.num_streams == 0)
        assert pipeline.num_queries == 1
        await listener.aclose()
        assert pipeline.num_queries == 0


async def test_a_question_being_answered_is_retrieved_for_again_only_at_new_words() -> None:
    source, backend = ScriptedSource([PAGE]), ScriptedBackend(is_endless=True)
    async with Pipeline(source, backend) as pipeline:
        listener = VoiceListener(pipeline, AT_ONCE)
        async with listener.answer([*GREETED, ("user", "how do I cancel")]) as answer:
            assert (await anext(answer)).text
            await listener.hear("So, how do I cancel?", GREETED, is_final=True)
            await listener.hear(" ", GREETED)
            await asyncio.sleep(0.02)
            assert source.queries == ["how do I cancel"]
            await listener.hear("how do I cancel a task", GREETED)
            await until(lambda: source.queries == ["how do I cancel", "how do I cancel a task"])
            await listener.hear("how do I cancel", GREETED)  # the recognizer takes it back
            await until(lambda: len(source.queries) == 3)
        await listener.aclose()
        assert (pipeline.num_queries, backend.num_requests) == (0, 0)


async def test_the_rule_is_that_of_the_caller_and_a_final_transcript_waits_for_none() -> None:
    source = ScriptedSource([PAGE])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        listener = VoiceListener(pipeline, {"rule": lambda text, retrieved: 0 if text.endswith("?") else None})
        await listener.hear("cancel", [])
        await asyncio.sleep(0.01)
        await listener.hear("cancel it?", [])
        await until(lambda: source.queries == ["cancel it?"])
        await listener.hear("cancel it all", [], is_final=True)
        await until(lambda: source.queries == ["cancel it?", "cancel it all"])
        await listener.hear("how?", [])  # without a word that names something
        await until(lambda: source.queries == ["cancel it?", "cancel it all", "how?"])
        await listener.aclose()
        with pytest.raises(ConfigurationError, match="idle_s=0"):
            VoiceListener(pipeline, {"idle_s": 0})


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.03])
async def test_cancelling_at_any_moment_leaves_nothing_behind(after_s: float) -> None:
    source, backend = ScriptedSource([0.003, PAGE, 0.003]), ScriptedBackend(is_endless=True)
    async with Pipeline(source, backend) as pipeline:
        listener = VoiceListener(pipeline, AT_ONCE)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                for text in ("cancel tasks", "cancel task groups"):
                    await listener.hear(text, GREETED)
                    await asyncio.sleep(0.002)
                await listener.hear("cancel task groups", GREETED[:2])
                async with listener.answer([*GREETED, ("user", "cancel task groups")]) as answer:
                    async for _ in answer:
                        pass
        await listener.aclose()
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)


@pytest.mark.parametrize(("framework", "package"), [("livekit", "livekit-agents"), ("pipecat", "pipecat-ai")])
def test_without_the_framework_the_error_has_the_install_line(
    framework: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"streamrag.adapters.{framework}", raising=False)
    for name in [framework, *(name for name in sys.modules if name.startswith(f"{framework}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=rf"{package} is not installed.*'\.\[{framework}\]'"):
        importlib.import_module(f"streamrag.adapters.{framework}")
