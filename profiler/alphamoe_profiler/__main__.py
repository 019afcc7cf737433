"""Run the command line with `python -m alphamoe_profiler`."""

from alphamoe_profiler.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
