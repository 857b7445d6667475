"""Faults in `token_streams`, one at a time, each of which `client_machine` must find."""

import sys
from pathlib import Path
from types import ModuleType

from streamrag.backends.vllm.client import token_streams

YIELDS = "await self._let_others_run()"
ADDS = "self._push(self._with(added, hint))"
UPDATES = (
    "num_shared = common_prefix_len(self._prompt.token_ids, prompt.token_ids, prompt.num_shared)\n"
    "        self._push(replace(prompt, num_shared=num_shared))"
)
FINISHES = "self._push(replace(self._with(added), is_complete=True), params)"
NEXT = "\n        "

MUTANTS: dict[str, tuple[str, str]] = {
    "a cancelled append has changed the prompt": (
        YIELDS + NEXT + ADDS,
        NEXT.join(("new = self._prompt = self._with(added, hint)", YIELDS, "self._push(new)")),
    ),
    "a cancelled update has changed the prompt": (
        YIELDS + NEXT + UPDATES,
        NEXT.join(("self._prompt = replace(prompt, is_complete=False)", YIELDS, UPDATES)),
    ),
    "a cancelled finish has completed the prompt": (
        YIELDS + NEXT + FINISHES,
        NEXT.join(
            (
                "old, self._prompt = self._prompt, replace(self._prompt, is_complete=True)",
                YIELDS,
                "self._prompt = old",
                FINISHES,
            )
        ),
    ),
    "a push can be cancelled when it is done": (YIELDS + NEXT + ADDS, ADDS + NEXT + YIELDS),
    "appends of several tasks overwrite each other": (
        YIELDS + NEXT + ADDS,
        NEXT.join(("new = self._with(added, hint)", YIELDS, "self._push(new)")),
    ),
    "the parameters of a finish that is refused stay": (
        "chunk_params = for_stream(answer_params, ",
        "self._answer_params = answer_params; chunk_params = for_stream(answer_params, ",
    ),
    "the parameters of a finish do not count": ("if params is None else", "if True else"),
    "a push that is refused is counted": (
        "check_prompt_len(len(new.token_ids), self._max_model_len)",
        "self._num_messages += len(new.token_ids) >= self._max_model_len\n"
        "        check_prompt_len(len(new.token_ids), self._max_model_len)",
    ),
    "a push that is refused has completed the prompt": (
        "if not new.token_ids:",
        "self._prompt = replace(self._prompt, is_complete=new.is_complete)\n        if not new.token_ids:",
    ),
    "an update keeps a token too many": (
        "common_prefix_len(self._prompt.token_ids, prompt.token_ids, prompt.num_shared)",
        "min(common_prefix_len(self._prompt.token_ids, prompt.token_ids, 0) + 1, len(prompt.token_ids))",
    ),
    "a dead engine is not noticed by a push": ("if self._engine.errored:", "if False:"),
    "a refused stream is not noticed by a push": ("self._is_aborted or self._error or", "self._is_aborted or"),
    "an aborted stream is not noticed by a push": ("self._is_aborted or self._error or", "self._error or"),
    "why the iteration failed is forgotten": (
        "while event is None and not self._is_answered and not self._error:",
        "while event is None and not self._is_answered:",
    ),
    "the end of the answer is forgotten": (
        "while event is None and not self._is_answered and not self._error:",
        "while event is None and not self._error:",
    ),
    "two who read wait for the same event": ("async with self._reading:", "if True:"),
    "progress of an older prompt is told": ("is_newest = ", "is_newest = True or "),
    "the engine goes on behind a stop text": (
        "                        self._begin_abort()",
        "                        pass",
    ),
    "an abort can be cancelled": ("await wait_shielded([self._aborting])", "await self._aborting"),
    "an abort leaves the task that hands over chunks": ("        self._outputs.close()\n", ""),
    "those that are aborted together are aborted one after the other": ("stream._begin_abort()", "pass"),
    "leaving the context aborts nothing": (
        "self._open.discard(stream)\n            await stream.abort()",
        "self._open.discard(stream)",
    ),
}
"""By what is wrong: a text of the module, and the one that takes its place."""


def mutant(name: str) -> ModuleType:
    """The module with this fault."""
    old, new = MUTANTS[name]
    source = Path(token_streams.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is not in one place"
    module = ModuleType("streamrag.backends.vllm.client.mutated_token_streams")
    sys.modules[module.__name__] = module  # where its dataclasses look for it
    exec(compile(source.replace(old, new), token_streams.__file__, "exec"), module.__dict__)
    return module
