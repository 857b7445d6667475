"""One query, from its options to its answer.

options ─▶ run: retrieval ─▶ mode, prompts, backend ─▶ answer_stream
                    relevance selects what fits into the context
"""
