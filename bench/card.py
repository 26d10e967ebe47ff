"""What only a GPU can tell, in one command: its tests, then the benchmarks, what is owed first, then what has been measured.

    python bench/card.py --minutes 9 --out DIR
    python bench/card.py --minutes 9 --out DIR --only rolling,kernels   what the call before had no time for
    python bench/card.py --dry --out DIR                                the same on the CPU, tiny models: does everything run?

Each part is a process of its own with a time limit; one that fails or is cut off leaves the others their turn. No part
begins after ``--minutes``. DIR/card.json holds what each part wrote and DIR/card.log what it printed, complete up to the last
part that ended; traces lie beside them. The table comes last, and names what has not run. Not among the parts: bench/loading.py,
which wants a process of its own with an empty kernel cache. Imports the standard library alone.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTEST = "-m pytest -q -c /dev/null --import-mode=importlib --rootdir=. -p no:cacheprovider"
CHAT = "--model qwen3-0.6b --workload chat"


@dataclass(frozen=True, slots=True)
class Part:
    """A process: what to run, for how many seconds at most, and what to run instead where there is no GPU.

    OUT in a command stands for a file that it writes JSON to, DIR for the directory of the results. dry None: nothing can be
    seen without a GPU. needs: a Python program that fails where the part has not what it needs; then it is passed over.
    """

    name: str
    limit_s: int
    command: str
    dry: str | None
    needs: str | None = None


PARTS = (
    Part("kernel tests", 200, f"{PYTEST} tests/gpu/test_kernels.py", f"{PYTEST} tests/gpu/test_kernels.py"),
    Part("engine tests", 300, f"{PYTEST} --durations=8 tests/gpu/test_engine.py", f"{PYTEST} tests/gpu/test_engine.py"),
    Part("shapes", 150, "bench/engine.py --model qwen2.5-1.5b,llama3.2-1b --workload chat,extract --limit 1000 --out OUT",
         "bench/engine.py --model tiny --device cpu --workload chat,extract --limit 3 --out OUT"),
    Part("rolling", 200, "bench/rolling.py --requests 8000 --windows 4096,256 --out OUT",
         "bench/rolling.py --model tiny --device cpu --requests 8 --windows 4,2 --out OUT"),
    Part("kernels", 130, "bench/kernels/all.py --out OUT", "bench/kernels/all.py --out OUT"),
    Part("sanitize", 270, "bench/sanitize.py --limit 240", "bench/sanitize.py --list"),
    Part("8b chat", 200, "bench/engine.py --model llama3-8b --workload chat --reps 2 --trace DIR/trace --out OUT", None),
    Part("shared chat", 150, "bench/rolling.py --workload chat_shared --requests 2000 --windows 256,64 --running-count --out OUT",
         "bench/rolling.py --model tiny --device cpu --workload chat_shared --requests 6 --windows 3,2 --running-count --out OUT"),
    Part("transformers' logits", 120, f"{PYTEST} tests/gpu/test_vs_transformers.py", f"{PYTEST} tests/gpu/test_vs_transformers.py"),
    Part("real text", 120, f"{PYTEST} -s tests/gpu/test_real_text.py", f"{PYTEST} tests/gpu/test_real_text.py",
         needs="import smollm; smollm.path()"),
    Part("larger shapes", 240, "bench/engine.py --model llama3.2-3b,qwen3-4b,qwen1.5-1.8b,qwen2.5-3b --workload chat,extract"
         " --limit 1000 --out OUT", None),
    Part("tiers", 120, "bench/tiers.py --model qwen3-0.6b --reps 1 --out OUT",
         "bench/tiers.py --model tiny --device cpu --slots 8 --kv-tokens 3000 --places 12 --bulk 24 --rate 4 --seconds 1"
         " --longest 32 --reps 1 --out OUT"),
    Part("options", 120, f"bench/options.py {CHAT} --limit 1200 --reps 1 --kinds penalties 'logprobs 5' 'top_p and penalties' --out OUT",
         "bench/options.py --model tiny --device cpu --limit 6 --reps 1 --kinds penalties 'logprobs 5' --out OUT"),
    Part("schema", 90, f"bench/options.py {CHAT} --limit 1200 --reps 1 --kinds 'json schema' --out OUT",
         "bench/options.py --model tiny --device cpu --limit 6 --reps 1 --kinds 'json schema' --out OUT"),
    Part("engine 0.6b", 150, "bench/engine.py --model qwen3-0.6b --workload chat,extract,decode --reps 2 --out OUT",
         "bench/engine.py --model tiny --device cpu --workload chat --limit 6 --out OUT"),
    Part("engine 8b", 300, "bench/engine.py --model llama3-8b --workload chat,extract,decode,longdoc --out OUT", None),
    Part("mixed steps", 90, "bench/mixed_steps.py --model qwen3-0.6b --out OUT",
         "bench/mixed_steps.py --model tiny --device cpu --cases 4x20 --steps 3 --out OUT"),
    Part("graphs 8b", 90, "bench/graphs.py --model llama3-8b --out OUT",
         "bench/graphs.py --model tiny --device cpu --batch 2 --steps 3 --out OUT"),
    Part("flips", 120, "bench/flips.py --model qwen3-0.6b --out OUT",
         "bench/flips.py --model tiny --device cpu --answers 2 --company 4 --tokens 4 --out OUT"),
    Part("fast chat", 60, f"bench/engine.py {CHAT} --limit 1000 --out OUT", None),  # what the next one is held against
    Part("invariant chat", 120, f"bench/engine.py {CHAT} --limit 1000 --batch-invariant --out OUT",
         "bench/engine.py --model tiny --device cpu --workload chat --limit 3 --batch-invariant --out OUT"),
    Part("transformers", 330, "bench/vs_transformers.py --model qwen3-0.6b --limit 25 --out OUT",
         "bench/vs_transformers.py --model tiny --device cpu --requests 8 --limit 4 --kv-gib 0.1 --probe-rows 4 --probe-width 32"
         " --probe-requests 4 --probe-tokens 4 --skip continuous --out OUT"),
    Part("overlap", 90, "bench/kernels/overlap.py", None),
    Part("halves", 60, "bench/halves.py --model qwen3-0.6b --out OUT", None),
)  # fmt: skip


def run(command: str, limit_s: float, log: Path) -> tuple[int | None, float, Any]:
    """Run a part; what it prints is added to the log. Returns its exit status (None: cut off), seconds, and its JSON."""
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        out = Path(folder) / "out.json"
        places = {"OUT": str(out), "DIR": str(log.parent)}
        words = [
            re.sub(r"^(OUT|DIR)\b", lambda found: places[found[0]], word) for word in shlex.split(command)
        ]
        output.write(f"\n==== {command}\n".encode())
        output.flush()
        paths = [".", "tests/harness", *filter(None, [os.environ.get("PYTHONPATH")])]
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the part and what it started
            process.wait()
            status = None
        return status, time.monotonic() - start, _read(out)


def _read(path: Path) -> Any:
    """What a part wrote, as far as it can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def last_line(log: Path) -> str:
    """The last line of the log that says something."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main() -> None:
    """Run the parts in turn, keep what they say, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins, or goes on, after these")
    parser.add_argument("--only", help="names of parts, comma separated")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    parser.add_argument("--out", type=Path, required=True, help="directory of card.json and card.log")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [part.name for part in PARTS]
    if unknown := set(names) - {part.name for part in PARTS}:
        parser.error(f"no part is called {sorted(unknown)}; there are {[part.name for part in PARTS]}")
    args.out.mkdir(parents=True, exist_ok=True)
    log, results, left, passed_over = args.out / "card.log", [], [], []
    end = time.monotonic() + 60 * args.minutes
    for part in PARTS:
        command = part.dry if args.dry else part.command
        if part.name not in names or command is None:
            continue
        remaining = end - time.monotonic()
        if remaining < 10:
            left.append(part.name)
            continue
        if part.needs and run(f"-c {shlex.quote(part.needs)}", min(60, remaining), log)[0] != 0:
            passed_over.append(f"{part.name}, for want of what it needs: {last_line(log)}")
            continue
        if args.commit and command.endswith("OUT"):
            command += f" --commit {args.commit}"
        status, seconds, told = run(command, min(part.limit_s, remaining), log)
        results.append(
            {"name": part.name, "command": command, "status": status, "seconds": seconds, "said": last_line(log),
             "result": told}
        )  # fmt: skip
        (args.out / "card.json").write_text(json.dumps(results, indent=1))
        print(line(results[-1]), flush=True)
    (args.out / "card.json").write_text(json.dumps(results, indent=1))
    print(f"\n{'part':<21}{'status':>8}{'s':>7}  last line")
    for result in results:
        print(line(result))
    for part in passed_over:
        print(f"passed over: {part}")
    if left:
        print(f"not run: --only {shlex.quote(','.join(left))}")
    sys.exit(any(result["status"] != 0 for result in results) or bool(left))


def line(result: dict[str, Any]) -> str:
    """A part's line of the table."""
    status = "cut off" if result["status"] is None else result["status"]
    return f"{result['name']:<21}{status:>8}{result['seconds']:>7.0f}  {result['said'][:110]}"


if __name__ == "__main__":
    main()
