"""Python reads this at the start of every process that the tests start, see `tests/conftest.py`.

Looking for garbage takes a quarter of the time in which vLLM is imported, and each engine imports it twice.
"""

import gc

gc.set_threshold(100_000, 50, 100)
