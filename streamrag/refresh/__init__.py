"""Retrieval in mid-answer: an answer goes on with passages that were retrieved for what it has said so far.

    when, for what, and the new prompt ─▶ refresh.py      generate, and again after each new prompt ─▶ query/run.py

Tokens that a caller has seen never change, and passages keep their numbers. Each segment of an answer is what the model
says after a prompt and the tokens so far. Source: PipeRAG, arXiv 2403.05676, whose retrieval also uses a query that is
some tokens old, in order to run beside decoding.
"""

from streamrag.refresh.refresh import MakeQuery as MakeQuery
from streamrag.refresh.refresh import Refresh as Refresh
from streamrag.refresh.refresh import latest_text as latest_text

__all__ = ["MakeQuery", "Refresh", "latest_text"]
