"""The part of an engine that runs in the program that embeds it.

backend                         VllmBackend, which a pipeline is given
token_streams                   prompts that are pushed piece by piece, and the tokens of their answers
streaming, answer_text          answering a growing prompt by such a stream; the text of its tokens
processes, spawned_main, log    the engine's processes begin and end, and what they print
arguments, sampling             what an engine and a request are told
calls, errors                   calls that end, also when the engine dies, and vLLM's errors as ours
measured                        an engine for benchmarks and profiles
"""
