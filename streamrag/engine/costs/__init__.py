"""What a step, a recomputation and a copy take, by the hardware.

measured files ─profile_files─▶ step_profiles, copy_costs ─price─▶ seconds to recompute, or to copy
nobody measured: device_speeds and the model's shape ─default_profile─▶ the same
"""
