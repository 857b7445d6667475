"""What a GPU is lent for a quarter of an hour can show, in one command that needs no network: `make gpu`.

    python -m studies.gpu.run [--device cpu] [--only PART,...] [--seconds 900] [--output FOLDER]

probe    2 minutes: what the machine has; 1,000 KV blocks are copied each way without an engine, as engines copy them
swap     3 minutes: streamed answers in float32, with memory for a third of the prompts and the rest in host memory
loads    6 minutes: an 8B model, crawls and searches, streaming and not, for one user and at 60 % of saturation
predict  2 minutes: the same loads in the simulator, with the steps and copies measured in `loads`; needs no GPU

Only with --only, because each takes minutes more:

exact, bfloat16, invariant  as `swap`, with all that vLLM's own scheduler answers; in the dtype in which models are
         served; and with vLLM's batch-invariant kernels, where no difference should remain
profile  the times to recompute and to copy KV, as a hardware profile

Each part is a process of its own, stopped at its limit or when the time of all is over, and writes its results as they
come. The same command keeps finished parts, and goes on with the others. FOLDER is $OUT/gpu, or bench-results/gpu. The
page with the results so far, gpu.md in $OUT or beside this file, is written anew after each part. `--device cpu` is
a rehearsal with tiny models, in a folder of its own.

An installation without FlashInfer or DeepGEMM needs
--engine-args '{"attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 0, "custom_ops": ["all"]}}'
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from studies.folders import KEPT, ROOT

from .engines import ENVIRONMENT, SIZES, Device, measured_model
from .page import write_page

NAMES = ("probe", "swap", "loads", "predict")
MORE_NAMES = ("exact", "bfloat16", "invariant", "profile")
LIMIT_S = 900.0


class Part(NamedTuple):
    limit_s: float
    """After which it counts as failed."""
    arguments: Sequence[str]
    """Python's."""


def make_parts(device: Device, engine_args: Mapping[str, Any], model: Path, output: Path) -> dict[str, Part]:
    """Return the parts by name. Each writes NAME.json in `output`, but `predict` adds to that of `loads`."""
    sizes = SIZES[device]
    files = {name: str(output / f"{name}.json") for name in (*NAMES, *MORE_NAMES)}
    args, measured = json.dumps(engine_args), json.dumps({**sizes.engine_args, **engine_args})
    exact = ("-m", "studies.gpu.exact", "--device", device, "--engine-args")
    float32 = (*exact, json.dumps({**engine_args, **sizes.float32_args}))
    loads = ("-m", "studies.gpu.loads", "--device", device, "--json", files["loads"])
    profile = ("-m", "streamrag", "profile", "--max-model-len", str(sizes.max_model_len))
    return {
        "probe": Part(120, ("-m", "studies.gpu.device", "--device", device, "--json", files["probe"])),
        "swap": Part(180, (*float32, "--alone", "--json", files["swap"])),
        "loads": Part(360, (*loads, "--engine-args", args)),
        "predict": Part(120, (*loads, "--predict")),
        "exact": Part(300, (*float32, "--json", files["exact"])),
        "bfloat16": Part(300, (*exact, args, "--json", files["bfloat16"])),
        "invariant": Part(300, (*exact, args, "--invariant", "--json", files["invariant"])),
        "profile": Part(
            420, (*profile, "--model", str(model), "--engine-args", measured, "--output", files["profile"])
        ),
    }


def run(name: str, part: Part, output: Path) -> bool:
    """Run a part, unless it is done; return whether it is. Its output goes to a log beside its result."""
    done, log = output / f"{name}.done", output / f"{name}.log"
    if done.exists():
        print(f"{name}: kept")
        return True
    if part.limit_s <= 0:
        print(f"{name}: no time left")
        return False
    start_s = time.monotonic()
    print(f"{name}, at most {part.limit_s:.0f} s ...", flush=True)
    with log.open("w") as file:
        status = call([sys.executable, *part.arguments], part.limit_s, file)
    if status != 0:
        print(f"{name}: {f'not done after {part.limit_s:.0f} s' if status is None else 'failed'}; last lines of {log}:")
        print(*log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
        return False
    print(f"{name}: done in {time.monotonic() - start_s:.0f} s", flush=True)
    done.touch()
    return True


def call(command: Sequence[str], limit_s: float, file: Any) -> int | None:
    """Return the exit status of a command, or None if it was stopped at its limit. At the end no process of it is left:
    an engine would keep the memory that the next part needs."""
    process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT / "bench", start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = os.environ.get("OUT")
    parser.add_argument("--device", choices=SIZES, default="cuda", help="cpu is a rehearsal with tiny models")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="of vLLM, in all parts")
    parser.add_argument("--only", default=",".join(NAMES), metavar="PART,...", help="of the parts above")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, metavar="S", help="of all parts (%(default)g)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for results, logs and what is done")
    parser.add_argument("--page", type=Path, metavar="FILE", help="for the page")
    arguments = parser.parse_args()
    end_s = time.monotonic() + arguments.seconds
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - {*NAMES, *MORE_NAMES}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join((*NAMES, *MORE_NAMES))}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    is_real = arguments.device == "cuda"
    output = (arguments.output or Path(out or KEPT, "gpu" if is_real else "gpu-rehearsal")).resolve()
    page = arguments.page or (Path(__file__).with_name("gpu.md") if is_real and not out else output / "gpu.md")
    output.mkdir(parents=True, exist_ok=True)
    are_done = []
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
        parts = make_parts(
            arguments.device, arguments.engine_args, measured_model(arguments.device, Path(folder)), output
        )
        for name in chosen:
            part = parts[name]
            are_done.append(run(name, part._replace(limit_s=min(part.limit_s, end_s - time.monotonic())), output))
            write_page(output, page)
    print(f"page: {page}")
    return 0 if all(are_done) else 1


if __name__ == "__main__":
    sys.exit(main())
