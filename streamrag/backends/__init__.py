"""Backends: where tokens come from.

    vllm/         an engine embedded in the program
    openai/       any OpenAI-compatible server
    ray/          replicas of an engine on Ray Serve
    lanes/        engines for prompts and engines for answers
    simulated/    vLLM's scheduler in virtual time, without a model
    measured/     a real vLLM whose steps are measured
    tools/        tools in prompts, and their calls in answers

All share `tokenizer` and `special_token_guard`. `warming` prefills growing prompts on engines that accept whole
requests only.
"""
