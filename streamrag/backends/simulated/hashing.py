"""Fast hashes of KV blocks, not secure against forgery.

vLLM's secure hashes would be most of the work in large simulations. These are Python's, of integers only, which are the
same in every run.
"""

from typing import Any

from vllm.v1.request import Request

from streamrag.backends.simulated.engine import BlockHasher


def quick_block_hasher(block_size: int) -> BlockHasher:
    """Return a hasher, which returns the hashes of a request's new full blocks, for text requests without adapters.
    Blocks are equal if all tokens up to their ends are equal."""

    def block_hashes(request: Request) -> list[Any]:
        hashes = request.block_hashes
        tokens = request._all_token_ids
        start, end = len(hashes) * block_size, request.num_tokens
        before = int.from_bytes(hashes[-1], "little", signed=True) if hashes else 0
        new_hashes = []
        while start + block_size <= end:
            before = hash((before, *tokens[start : start + block_size]))
            new_hashes.append(before.to_bytes(8, "little", signed=True))
            start += block_size
        return new_hashes

    return block_hashes
