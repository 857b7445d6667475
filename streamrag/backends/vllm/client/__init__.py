"""The part of an engine that runs in the program that embeds it.

backend                         `VllmBackend`, the backend for a pipeline
token_streams                   prompts that are pushed piece by piece, and the tokens of their answers
streaming, answer_text          answers a growing prompt through such a stream; the text of its tokens
lane_engine                     arguments of an engine that passes KV to another, or gets it
processes, spawned_main, log    start and stop the engine's processes, and capture what they print
arguments, sampling             arguments of an engine; sampling parameters of a request
calls, vllm_errors              calls that end even if the engine dies; translation of vLLM's errors
stats                           statistics of an engine's steps
"""
