"""Write the rows of the arms: `bestof/references.py --chosen FILE --test FILE --out DIR`.

The first FILE is what `vapo select --best-of best` wrote. OUT/best.jsonl, single.jsonl and
truth.jsonl have the same problems. Their column `reference` is the final answer of the best of the
samples, of the first one, and the right one: the tiny judge compares a response with an answer
alone. `critic_prompt` is the prompt with the reference behind it. OUT/test.jsonl has the held-out
problems with the verifier `math`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import task
from runner.samples import read_samples

NAMES = ("best", "single", "truth")


def final_answer(response: str) -> str | None:
    """Return the digit at the end of a response; None: it ends otherwise."""
    _, marker, answer = response.rpartition(task.ANSWER_MARKER)
    return answer if marker and answer in set("0123456789") else None


def main() -> None:
    """Write the files; a problem without one of the references is in none of the arms'."""
    parser = argparse.ArgumentParser(description="Write the rows of the arms.")
    parser.add_argument("--chosen", type=Path, required=True, help="what vapo select wrote")
    parser.add_argument("--test", type=Path, required=True, help="held-out problems")
    parser.add_argument("--out", type=Path, required=True, help="directory of the files")
    parser.add_argument("--seed", type=int, default=0, help="without meaning here")
    args = parser.parse_args()
    rows = pyarrow.parquet.read_table(args.chosen).to_pylist()
    samples = read_samples(args.chosen.with_suffix(".samples.jsonl"))
    first = {line["prompt_index"]: line["responses"][0]["text"] for line in samples}
    assert len(first) == len(rows), "nothing was dropped, so that rows are in the samples' order"
    lines: dict[str, list[str]] = {name: [] for name in NAMES}
    for index, row in enumerate(rows):
        prompt, answer = row["prompt"], row["answer"]
        found = (final_answer(row["best"]), final_answer(first[index]), answer)
        if None in found:
            continue
        for name, reference in zip(NAMES, found, strict=True):
            own = {"reference": reference, "critic_prompt": f"{prompt}{reference}"}
            lines[name].append(json.dumps({"prompt": prompt, "answer": answer, **own}) + "\n")
    held_out = map(json.loads, args.test.read_text().splitlines())
    lines["test"] = [json.dumps({**row, "verifier": "math"}) + "\n" for row in held_out]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, written in lines.items():
        (args.out / f"{name}.jsonl").write_text("".join(written))
    print(f"{len(lines['best'])} of {len(rows)} problems in {args.out}")


if __name__ == "__main__":
    main()
