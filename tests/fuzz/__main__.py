"""`make fuzz`: the long run. Writes its figures as JSON and into docs/reliability.md; leaves with 1 if anything is wrong."""

import argparse
import json
import signal
import sys
from pathlib import Path

import torch

from fuzz.campaign import campaign
from fuzz.page import joined, updated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=3000)
    parser.add_argument("--interruptions", type=int, default=300)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("out/fuzz.json"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="JSON", help="only write the page, for these runs together"
    )
    given = parser.parse_args()
    if given.join:
        together = joined([json.loads(path.read_text(encoding="utf-8")) for path in given.join])
        given.page.write_text(updated(given.page.read_text(encoding="utf-8"), together), encoding="utf-8")
        return 1 if together["findings"] else 0
    torch.set_num_threads(1)
    # A shell has jobs in the background ignore SIGINT, and so would this run and all it starts: nothing would be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    figures = campaign(given.inputs, given.interruptions, given.kills, given.seed, lambda said: print(said, flush=True))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    figures.write(given.json)
    text = given.page.read_text(encoding="utf-8")
    given.page.write_text(updated(text, json.loads(given.json.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{len(figures.findings)} findings; figures in {given.json} and {given.page}")
    return 1 if figures.findings else 0


if __name__ == "__main__":
    sys.exit(main())
