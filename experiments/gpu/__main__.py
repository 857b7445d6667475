"""All measurements that need a GPU, in one command that needs no network: `make gpu`.

    python -m experiments.gpu [--device cpu] [--only PART,...] [--output FOLDER]

device     what the machine has, and how fast it copies between device and host
exact      answers to streamed prompts compared with those to whole prompts, in float32, short of memory
bfloat16   the same in the dtype in which models are served
invariant  the same with vLLM's batch-invariant kernels, where no difference should remain
profile    the times to recompute and to copy KV, as a hardware profile
copies     do steps take longer while KV is copied beside them?
loads      no streaming, warming, vLLM's sessions and streaming at three loads; what our scheduler adds to a step
predict    the same loads in the simulator, with the measured profile; needs no GPU

Each part is a process of its own with a time limit. Finished parts are kept in FOLDER, and the same command goes on
with the others. The end of each run writes the page, experiments/results/gpu.md.

An installation without FlashInfer or DeepGEMM needs
--engine-args '{"attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 0, "custom_ops": ["all"]}}'
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .engines import ENVIRONMENT, SIZES, Device, measured_model
from .page import write_page

EXPERIMENTS = Path(__file__).parent.parent
PAGE = EXPERIMENTS / "results" / "gpu.md"
NAMES = ("device", "exact", "bfloat16", "invariant", "profile", "copies", "loads", "predict")


class Part(NamedTuple):
    limit_s: float
    """After which it counts as failed."""
    arguments: Sequence[str]
    """Python's."""


def make_parts(device: Device, engine_args: Mapping[str, Any], model: Path, output: Path) -> dict[str, Part]:
    """Return the parts by name. Each writes NAME.json in `output`, but `predict` adds to that of `loads`."""
    sizes = SIZES[device]
    files = {name: str(output / f"{name}.json") for name in NAMES}
    args, measured = json.dumps(engine_args), json.dumps({**sizes.engine_args, **engine_args})
    exact = ("-m", "experiments.gpu.exact", "--device", device)
    as_served = (*exact, "--engine-args", args)
    loads = ("-m", "experiments.gpu.loads", "--device", device, "--json", files["loads"])
    profile = ("-m", "streamrag", "profile", "--no-plot", "--max-model-len", str(sizes.max_model_len))
    copies = ("experiments/copy_overlap.py", "--model", str(model), "--engine-args", measured)
    return {
        "device": Part(60, ("-m", "experiments.gpu.device", "--json", files["device"])),
        "exact": Part(
            300,
            (*exact, "--engine-args", json.dumps({**engine_args, **sizes.float32_args}), "--json", files["exact"]),
        ),
        "bfloat16": Part(300, (*as_served, "--json", files["bfloat16"])),
        "invariant": Part(300, (*as_served, "--invariant", "--json", files["invariant"])),
        "profile": Part(
            420, (*profile, "--model", str(model), "--engine-args", measured, "--output", files["profile"])
        ),
        "copies": Part(300, (*copies, "--json", files["copies"])),
        "loads": Part(900, (*loads, "--engine-args", args)),
        "predict": Part(600, (*loads, "--predict")),
    }


def run(name: str, part: Part, output: Path) -> bool:
    """Run a part, unless it is done; return whether it is. Its output goes to a log beside its result."""
    done, log = output / f"{name}.done", output / f"{name}.log"
    if done.exists():
        print(f"{name}: kept")
        return True
    start_s = time.monotonic()
    print(f"{name} ...", flush=True)
    try:
        with log.open("w") as file:
            command = [sys.executable, *part.arguments]
            subprocess.run(command, check=True, stdout=file, stderr=file, timeout=part.limit_s, cwd=EXPERIMENTS.parent)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        what = f"not done after {part.limit_s:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else "failed"
        print(f"{name}: {what}; the last lines of {log}:")
        print(*log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
        return False
    print(f"{name}: done in {time.monotonic() - start_s:.0f} s", flush=True)
    done.touch()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIZES, default="cuda", help="cpu tries the programs with a tiny model")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="of vLLM, in all parts")
    parser.add_argument("--only", default=",".join(NAMES), metavar="PART,...", help="of the parts above")
    parser.add_argument("--output", type=Path, default=Path("bench-results/gpu"), metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: experiments/results/gpu.md")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
        model = measured_model(arguments.device, Path(folder))
        parts = make_parts(arguments.device, arguments.engine_args, model, output)
        are_done = [run(name, part, output) for name, part in parts.items() if name in chosen]
    write_page(output, arguments.page)
    print(f"page: {arguments.page}")
    return 0 if all(are_done) else 1


if __name__ == "__main__":
    sys.exit(main())
