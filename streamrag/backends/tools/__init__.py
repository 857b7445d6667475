"""Tools for all backends: `template` has them in the prompt, `parser` finds their calls in the answer."""
