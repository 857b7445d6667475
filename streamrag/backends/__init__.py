"""Backends: where tokens come from.

    vllm/         an engine embedded in the program
    openai/       any OpenAI-compatible server
    ray/          replicas of an engine on Ray Serve
    simulated/    vLLM's scheduler in virtual time, without a model

All share `tokenizer` and `look_alikes`. `warming` prefills growing prompts on engines that accept whole requests only.
"""
