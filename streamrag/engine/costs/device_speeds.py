"""How fast devices are, by their data sheets: what is assumed of one that nobody has measured.

Peaks are dense, of 16-bit products. Host bandwidths are what pinned copies reach of the link, in each direction: about
50 GB/s of PCIe Gen5 x16, 24 of Gen4 x16. A device that is not listed is taken to be a slow one.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of one device. Bandwidths are in bytes per second."""

    name: str
    peak_flops: float
    bandwidth_bytes_per_s: float
    host_bandwidth_bytes_per_s: float


# The first whose name is among the words of the device's: a longer name stands before a shorter one.
CUDA_DEVICES = (
    DeviceSpeed("GB200", 2_500e12, 8.0e12, 350e9),
    DeviceSpeed("B200", 2_250e12, 8.0e12, 50e9),
    DeviceSpeed("GH200", 989e12, 4.0e12, 350e9),
    DeviceSpeed("H200", 989e12, 4.8e12, 50e9),
    DeviceSpeed("H100 PCIe", 756e12, 2.0e12, 50e9),
    DeviceSpeed("H100", 989e12, 3.35e12, 50e9),
    DeviceSpeed("H20", 148e12, 4.0e12, 50e9),
    DeviceSpeed("A100", 312e12, 1.55e12, 24e9),
    DeviceSpeed("L40S", 362e12, 864e9, 24e9),
    DeviceSpeed("L40", 181e12, 864e9, 24e9),
    DeviceSpeed("A40", 149.7e12, 696e9, 24e9),
    DeviceSpeed("A10", 125e12, 600e9, 24e9),
    DeviceSpeed("A10G", 70e12, 600e9, 24e9),
    DeviceSpeed("L4", 121e12, 300e9, 24e9),
    DeviceSpeed("T4", 65e12, 300e9, 12e9),
)
OTHER_CUDA_DEVICE = DeviceSpeed("another GPU", 60e12, 500e9, 12e9)
FULL_PRECISION = 1 / 16
"""Peak of 32-bit products, as a share of the 16-bit peak."""

CORE_FLOPS = 40e9
"""FLOPs per second of one CPU core, with 32 bits."""
CPU_BANDWIDTH_BYTES_PER_S = 10e9
CPU_COPY_BYTES_PER_S = 4e9


def speed_of_cuda(device_name: str, dtype_bytes: float) -> DeviceSpeed:
    """Return the assumed speed of a GPU, given its name as CUDA reports it."""
    listed = (each for each in CUDA_DEVICES if re.search(rf"\b{each.name}\b", device_name))
    found = next(listed, OTHER_CUDA_DEVICE)
    peak = found.peak_flops * (FULL_PRECISION if dtype_bytes >= 4 else 1.0)
    return DeviceSpeed(found.name, peak, found.bandwidth_bytes_per_s, found.host_bandwidth_bytes_per_s)


def speed_of_cpu(num_cores: int) -> DeviceSpeed:
    """Return the assumed speed of `num_cores` CPU cores."""
    return DeviceSpeed(f"{num_cores} cores", num_cores * CORE_FLOPS, CPU_BANDWIDTH_BYTES_PER_S, CPU_COPY_BYTES_PER_S)
