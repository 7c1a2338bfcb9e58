"""`python -m benchmarks table [FOLDER]`: the README's tables and the pictures, anew from the results."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.pictures import write_pictures
from benchmarks.readme import write_readme


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] != "table" or len(arguments) > 2:
        sys.exit("usage: python -m benchmarks table [FOLDER]   (to measure: spiritlevel bench)")
    folder = Path(arguments[1] if len(arguments) == 2 else "benchmarks")
    for path in (write_readme(folder), *write_pictures(folder)):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
