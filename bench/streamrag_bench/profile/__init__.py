"""Measurement of a hardware profile on a running engine: steps, recomputation, and copies of KV."""
