"""The largest errors seen in the property tests on a GPU, as a Markdown table.

rm -f runs/error_ratios.jsonl
uv run pytest tests/test_flash_properties.py && uv run scripts/error_ratios.py [runs/error_ratios.jsonl]
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro

from cs336_systems.bench.cli import CommandLine, run_script

TENSORS = ("o", "L", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line."""

    jsonl: tyro.conf.Positional[Path] = Path("runs/error_ratios.jsonl")
    """The errors that the property tests recorded."""


def main(config: Config) -> None:
    if not config.jsonl.is_file():
        raise ValueError(f"there is no {config.jsonl}; the property tests write it on a GPU")
    rows = [json.loads(line) for line in config.jsonl.read_text(encoding="utf-8").splitlines()]
    groups = defaultdict(list)
    for row in rows:
        groups[row["implementation"], row["dtype"]].append(row)

    print(f"| implementation | dtype | cases | {' | '.join(TENSORS)} |")
    print(f"| --- | --- | ---: |{' --- |' * len(TENSORS)}")
    for (implementation, dtype), group in sorted(groups.items()):
        worst = [
            f"{largest(group, 'share_of_budget', name):.2f} ({largest(group, 'times_dense', name):.2f})"
            for name in TENSORS
        ]
        print(f"| {implementation} | {dtype} | {len(group)} | {' | '.join(worst)} |")
    print("\nLargest error as a share of its budget, and in brackets as a multiple of dense attention's own error.")
    machines = {(r["gpu"], r["torch"], r["triton"], r["commit"], r["dirty"]) for r in rows}
    for gpu, torch, triton, commit, dirty in sorted(machines, key=str):
        changes = " with local changes" if dirty else ""
        print(f"Measured on {gpu}, torch {torch}, triton {triton}, commit {commit}{changes}.")


def largest(rows: list[dict], ratio: str, tensor: str) -> float:
    return max((row[ratio][tensor] for row in rows if row[ratio][tensor] is not None), default=0.0)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
