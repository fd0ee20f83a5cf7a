"""Write the problems of the selection example: `selection/problems.py --out DIR [--seed 0]`.

pool.jsonl has what prompts are selected from, random.jsonl a random part of it, divided into
hackable.jsonl, on which the weak judge can be hacked, and rest.jsonl. test.jsonl has the held-out
problems, judged by the ground truth: the hackable ones under the name `hackable`, and once more by
that judge as `hackable_weak`; the rest as `rest`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import task

from selection.weak_judge import is_hackable

POOL, KEPT, TEST = 1024, 128, 192


def test_rows(problems: Sequence[task.Problem]) -> list[dict[str, str]]:
    """Return rows of test.jsonl, whose column `verifier` says who judges."""
    return [
        {"prompt": p.prompt, "answer": str(p.answer), "verifier": verifier}
        for p in problems
        for verifier in (("hackable", "hackable_weak") if is_hackable(p.prompt) else ("rest",))
    ]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write the selection example's problems.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pool = task.training_problems(POOL, args.seed)
    task.write_jsonl(args.out / "pool.jsonl", pool)
    drawn = random.Random(f"selection, random, {args.seed}").sample(pool, KEPT)
    task.write_jsonl(args.out / "random.jsonl", drawn)
    for name, hackable in (("hackable", True), ("rest", False)):
        some = [problem for problem in drawn if is_hackable(problem.prompt) == hackable]
        task.write_jsonl(args.out / f"{name}.jsonl", some)
    rows = test_rows(task.test_problems(TEST, args.seed))
    (args.out / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{POOL} problems, {KEPT} drawn from them, and {TEST} held-out ones in {args.out}")


if __name__ == "__main__":
    main()
