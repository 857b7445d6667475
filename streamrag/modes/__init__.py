"""From chunk events to prompts: how a context grows or changes, and how it becomes token ids."""

from streamrag.modes.context import AppendMode, UpdateMode
from streamrag.modes.prompt import AssembledPrompt, PromptAssembler, PromptTemplate

__all__ = ["AppendMode", "AssembledPrompt", "PromptAssembler", "PromptTemplate", "UpdateMode"]
