"""Where tokens come from.

    vllm/         an engine embedded in the program
    openai/       a server, whatever runs behind it
    simulated/    vLLM's scheduler in virtual time, without a model

`warming` prefills growing prompts on engines that know whole requests only; `tokenizer` and `look_alikes` are for all.
"""
