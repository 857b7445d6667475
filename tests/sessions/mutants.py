"""Faults of one line in what sessions are made of. The fuzz of sessions must find each within the seeds it is allowed.

python -m tests.sessions.mutants
"""

import sys

from tests.engine.mutants import Mutant, main

__all__ = ["MUTANTS"]


def mutant(name: str, module: str, old: str, new: str, within: int) -> Mutant:
    return Mutant(name, module, old, new, within, fuzz="tests.sessions.fuzz")


SESSION, INGESTION = "streamrag.sessions.session", "streamrag.sessions.ingestion"
WINDOW, PROMPTS = "streamrag.sessions.window", "streamrag.sessions.prompts"
QUESTION, QUESTIONS = "streamrag.sessions.question_options", "streamrag.sessions.questions"
ANSWER, WATCHES, TASKS = "streamrag.sessions.answer", "streamrag.sessions.watched_questions", "streamrag.sessions.tasks"
CONTENTS, FILE = "streamrag.sessions.log.contents", "streamrag.sessions.log.file"
STREAMS = "streamrag.backends.vllm.client.token_streams"
HOST_MEMORY = "streamrag.backends.vllm.scheduler.host_memory.memory"
HOOKS, QUEUES = "streamrag.backends.vllm.scheduler.hooks", "streamrag.backends.vllm.scheduler.queues"

MUTANTS = (
    mutant(
        "a slide keeps what is left of a block",
        WINDOW,
        "del self._token_ids[:num_gone]",
        "del self._token_ids[: num_gone // 4 * 4]",
        10,
    ),
    mutant("a slide keeps too much", WINDOW, "- num_gone > self._kept_tokens", "- num_gone > self.max_tokens", 10),
    mutant(
        "data that are too long are not cut",
        WINDOW,
        "WindowChunk(piece.number, self._cut(piece.token_ids))",
        "piece",
        10,
    ),
    mutant(
        "a batch is labelled with the version of its first chunk",
        INGESTION,
        "max(batch[-1].number",
        "max(batch[0].number",
        10,
    ),
    mutant(
        "questions see data that are not computed yet, under the version before",
        INGESTION,
        "        has_slid = self.window.add(pieces)\n",
        "        has_slid = self.window.add(pieces)\n        self.ready = self._snapshot(self.ready.version)\n",
        10,
    ),
    mutant(
        "another system text is there before the data that came before it",
        INGESTION,
        "self._buffer.take(MAX_BATCH, number)",
        "self._buffer.take(MAX_BATCH)",
        100,
    ),
    Mutant(
        "the words of the system text before are around a question",
        INGESTION,
        "self.window.token_ids, self._prompts)",
        "self.window.token_ids, self.ready.prompts)",
        0,
        "tests/sessions/test_session.py::test_a_system_text_may_be_replaced_before_any_data",
    ),
    Mutant(
        "another system text keeps the stream",
        INGESTION,
        " or prompts is not self._prompts",
        "",
        0,
        "tests/sessions/test_session.py::test_a_new_system_text_is_computed_while_questions_use_the_old_one",
    ),
    mutant("a version is thought to be there too soon", INGESTION, "version < version:", "version < version - 1:", 20),
    mutant("data are forgotten while others are computed", INGESTION, "if not len(self._buffer):", "if True:", 20),
    mutant("the stream before a slide stays open", INGESTION, "num_kept=int(is_computed)", "num_kept=2", 20),
    mutant(
        "closing leaves the stream open",
        INGESTION,
        "            await self._close_streams()\n",
        "            pass\n",
        5,
    ),
    mutant(
        "the newest is dropped for what is new",
        WINDOW,
        "dropped = self._waiting.popleft()",
        "dropped = self._waiting.pop()",
        20,
    ),
    mutant("answers outlive their version", SESSION, "        self._questions.cache.clear()\n", "        pass\n", 20),
    mutant(
        "an answer to older data is kept for the newest",
        QUESTIONS,
        "if question.is_repeatable and answer.version == self._data.ingestion.ready.version:",
        "if question.is_repeatable:",
        100,
    ),
    mutant("answers are kept for other parameters", QUESTION, "0.0, _exact(params))", '0.0, "x")', 20),
    mutant("answers are kept for other questions", QUESTION, "key = (text,", 'key = ("",', 20),
    mutant(
        "the model is not told that there are no data", PROMPTS, "self._no_data if data == self.head else ()", "()", 10
    ),
    mutant(
        "an answer is labelled with a version that follows",
        ANSWER,
        "version=snapshot.version",
        "version=snapshot.version + 1",
        5,
    ),
    mutant(
        "a watched answer to older data is given",
        WATCHES,
        "watch.newest is None or watch.version != version or",
        "watch.newest is None or",
        50,
    ),
    mutant(
        "a restricted answer is given to whoever asks",
        QUESTION,
        "frozenset(answers), self.decisive",
        "frozenset(), self.decisive",
        50,
    ),
    mutant("answers that begin alike are not told apart", ANSWER, "len(candidates) == 1 and ", "", 50),
    mutant("a further pass forgets what was begun", ANSWER, "token_ids + prefix", "token_ids", 50),
    mutant("a watch is answered once", WATCHES, "watch.version < version and", "watch.version < 0 and", 20),
    mutant(
        "a watch tells what its reader knows",
        WATCHES,
        "answer if answer.text != self._last_read else None",
        "answer",
        50,
    ),
    mutant(
        "who leaves is forgotten, and their request is not",
        TASKS,
        '            await end_or_leave(task, f"a {what} of {self._name} that was stopped")\n',
        "            pass\n",
        50,
    ),
    mutant("a stream that is left goes on", INGESTION, "            await end_or_leave(", "            _ = (", 5),
    Mutant(
        "data that have gone stay in the log",
        CONTENTS,
        "in old_chunks.keys() - contents.chunks.keys()]",
        "in ()]",
        0,
        "tests/sessions/test_log.py::test_a_session_goes_on_where_it_ended",
    ),
    Mutant(
        "text that has gone is not overwritten",
        FILE,
        '"secure_delete=ON"',
        '"secure_delete=OFF"',
        0,
        "tests/sessions/test_log.py::test_texts_that_have_gone_are_overwritten",
    ),
    Mutant(
        "two sessions have one log",
        FILE,
        "                self._lock.take()\n                _remove",
        "                _remove",
        0,
        "tests/sessions/test_log.py::test_a_log_has_one_session_at_a_time",
    ),
    Mutant(
        "a database with other tables is opened",
        FILE,
        "if schema != set(SCHEMA):",
        "if not schema:",
        0,
        "tests/sessions/test_log.py::test_a_database_that_is_damaged_or_means_harm_is_explained_and_stays",
    ),
    Mutant(
        "a journal that was planted is played back",
        FILE,
        'suffix == "-journal" or ',
        "",
        0,
        "tests/sessions/test_log.py::test_a_journal_that_is_planted_is_not_played_back",
    ),
    mutant(
        "leaving aborts nothing",
        STREAMS,
        "            await stream.abort()\n\n    async def aclose",
        "            pass\n\n    async def aclose",
        10,
    ),
    mutant(
        "the blocks of who left are freed twice",
        HOOKS,
        "        kv_params, ec_params = super()._free_request(request, delay_free_blocks)\n",
        "        if request.status == RequestStatus.FINISHED_ABORTED:\n"
        "            for blocks in self.kv_cache_manager.get_blocks(request.request_id).blocks:\n"
        "                self.kv_cache_manager.block_pool.free_blocks(blocks)\n"
        "        kv_params, ec_params = super()._free_request(request, delay_free_blocks)\n",
        10,
    ),
    mutant(
        "an aborted stream stays idle",
        QUEUES,
        "            self.idle.pop(request_id, None)\n",
        "            pass\n",
        10,
    ),
    mutant(
        "blocks are loaded into the wrong place",
        HOST_MEMORY,
        "[request.request_id][start:end]",
        "[request.request_id][: end - start]",
        200,
    ),
    mutant(
        "host memory survives a reset",
        HOOKS,
        "                self.plugin.host_memory.clear()\n",
        "                pass\n",
        200,
    ),
)

if __name__ == "__main__":
    sys.exit(main(MUTANTS))
