"""Questions that are still being asked: retrieval and prefill begin with what has been said or typed so far.

    partial ─▶ how long must it last? ─▶ a query whose source ends with `commit`      rules.py, held_source.py
    commit  ─▶ the same text: the query goes on; another one: a new query             question.py

The answer is that to the committed question. An earlier query only saves time: it is the same one, or it has left its
passages in caches.
"""

from streamrag.open_questions.question import ListenOptions as ListenOptions
from streamrag.open_questions.question import OpenQuestion as OpenQuestion
from streamrag.open_questions.question import QueriesAhead as QueriesAhead
from streamrag.open_questions.question import open_question as open_question
from streamrag.open_questions.rules import QuestionRule as QuestionRule
from streamrag.open_questions.rules import WaitForWords as WaitForWords
from streamrag.open_questions.rules import content_words as content_words

__all__ = ["ListenOptions", "OpenQuestion", "QueriesAhead", "QuestionRule", "WaitForWords", "content_words"]
