"""Fold chunk events into a context, and assemble the context into a prompt of token ids."""

from streamrag.modes.context import AppendMode as AppendMode
from streamrag.modes.context import UpdateMode as UpdateMode
from streamrag.modes.prompt import AssembledPrompt as AssembledPrompt
from streamrag.modes.prompt import PromptAssembler as PromptAssembler
from streamrag.modes.prompt import PromptTemplate as PromptTemplate
