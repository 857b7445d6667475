"""Run the `streamrag` program with `python -m streamrag`."""

from streamrag.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()
