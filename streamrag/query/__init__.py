"""One query's life.

options ─▶ run: retrieval ─▶ mode, prompts, backend ─▶ answer_stream
                    relevance chooses what fits into the context
"""
