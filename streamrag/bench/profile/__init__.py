"""The measurement of a hardware profile on a running engine: its steps, recomputation, and copies."""
