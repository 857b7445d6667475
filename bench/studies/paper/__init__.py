"""Every table and figure of the Stream2LLM paper's evaluation, simulated, and what beats it: `make paper`.

points, ways ─▶ plan: cells ─▶ results: run, pooled ─▶ sections ─▶ README.md
                                     standing, targets, effects ──┘        pictures beside it

Source of what is reproduced: arXiv 2604.16395, "Stream2LLM".
"""
