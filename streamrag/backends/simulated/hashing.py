"""Hashes of KV blocks, where nobody means harm.

vLLM hashes blocks so that nobody can forge a prefix; in large simulations that would be most of the work. Here a
block's hash is Python's, of integers only, which is the same in every run.
"""

from typing import Any

from vllm.v1.request import Request

from streamrag.backends.simulated.engine import BlockHasher


def quick_block_hasher(block_size: int) -> BlockHasher:
    """Return a hasher for requests of text without adapters. Blocks are equal where all tokens up to their ends are."""

    def block_hashes(request: Request) -> list[Any]:
        hashes = request.block_hashes
        tokens = request._all_token_ids
        start, end = len(hashes) * block_size, request.num_tokens
        before = int.from_bytes(hashes[-1], "little", signed=True) if hashes else 0
        found = []
        while start + block_size <= end:
            before = hash((before, *tokens[start : start + block_size]))
            found.append(before.to_bytes(8, "little", signed=True))
            start += block_size
        return found

    return block_hashes
