"""Studies: one folder per question. Each README has the question, the answer and the command."""
