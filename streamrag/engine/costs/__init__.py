"""The time of steps, recomputations and copies on an engine's hardware.

measured files ─profile_files─▶ step_profiles, copy_costs ─price─▶ seconds to recompute, or to copy
without measurements: the device's data sheet and the model's shape ─default_profile─▶ the same
"""
