"""Make a trace of streamrag from a public trace, read as it is.

    python -m studies.public_traces.run mooncake conversation_trace.jsonl --output FILE
    python -m studies.public_traces.run azure-llm AzureLLMInferenceTrace_conv.csv --output FILE
    python -m studies.public_traces.run stream2llm-crawler FOLDER --output FILE [--tokenizer MODEL]
    python -m studies.public_traces.run stream2llm-anns query_trace_map_5k.json --output FILE [--corpus FOLDER]

A broken row is an error that names the file and the line.
"""

import argparse
import sys
from pathlib import Path

from streamrag.cli.record import make_counter
from streamrag.errors import StreamRagError
from streamrag.trace import Trace, write_trace

from .production import read_azure_llm, read_mooncake
from .stream2llm import read_stream2llm_anns, read_stream2llm_crawler

FORMATS = ("mooncake", "azure-llm", "stream2llm-crawler", "stream2llm-anns")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("path", type=Path, metavar="PATH", help="the file or the folder as it was published")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl, .jsonl.gz or .jsonl.zst")
    parser.add_argument("--queries", type=int, metavar="N", help="only the first N")
    parser.add_argument("--force", action="store_true", help="replace the file that is there")
    parser.add_argument("--tokenizer", metavar="MODEL", help="of stream2llm: counts tokens of texts, in place of words")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="of stream2llm-anns, if not beside the map")
    parser.add_argument("--text", choices=("full", "hash"), default="full", help="keep texts, or only lengths")
    given = parser.parse_args(arguments)
    try:
        trace = _read(given)
        write_trace(trace, given.output, text=given.text, overwrite=given.force)
    except StreamRagError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.output}: {len(trace.queries)} queries from {given.path}")
    return 0


def _read(given: argparse.Namespace) -> Trace:
    if given.format == "mooncake":
        return read_mooncake(given.path, max_queries=given.queries)
    if given.format == "azure-llm":
        return read_azure_llm(given.path, max_queries=given.queries)
    tokenizer, count = make_counter(given.tokenizer)
    if given.format == "stream2llm-crawler":
        return read_stream2llm_crawler(given.path, count_tokens=count, max_queries=given.queries, tokenizer=tokenizer)
    return read_stream2llm_anns(
        given.path, count_tokens=count, max_queries=given.queries, tokenizer=tokenizer, corpus_dir=given.corpus
    )


if __name__ == "__main__":
    sys.exit(main())
