"""Every kernel's figures in one run, kept as rows of kernel, shape, microseconds, TB/s or TFLOP/s, share of the ceiling.

    python bench/kernels/all.py --out bench/results/kernels-h200.json
    TRITON_INTERPRET=1 python bench/kernels/all.py       without a GPU: does everything run?

Attention first, since most of a step is it. No kernel begins after ``--seconds``; one that fails leaves the others their turn.
"""

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

import timing

sys.path.append(str(Path(__file__).resolve().parents[1]))

import results_file

SCRIPTS = (
    "decode_attention", "prefill_attention", "library_attention", "shared_prefix", "sample", "logprobs", "edit_logits",
    "mask_logits", "matmul", "swiglu", "rms_norm", "silu_mul", "rope_cache", "segment_sum", "step_inputs", "products",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=110, help="no kernel begins after these")
    parser.add_argument("--only", help="names of scripts, comma separated")
    parser.add_argument("--out", type=Path, help="append rows to this JSON file")
    parser.add_argument("--commit", help="what to write into the results where there is no checkout to ask")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else SCRIPTS
    if unknown := set(names) - set(SCRIPTS):
        parser.error(f"no script is called {sorted(unknown)}; there are {', '.join(SCRIPTS)}")
    ceilings = {"copy_bytes_per_s": timing.COPY_BANDWIDTH, "matrix_flops_per_s": timing.MATRIX_RATE}
    results = results_file.ResultsFile(args.out, args.commit, device=timing.DEVICE, ceilings=ceilings)
    begin, missing = time.monotonic(), []
    for name in names:
        if time.monotonic() - begin > args.seconds:
            missing.append(name)
            continue
        start = time.monotonic()
        try:
            importlib.import_module(name).main()
        except Exception:
            traceback.print_exc()
            missing.append(name)
        results.append(timing.rows)
        timing.rows.clear()
        print(f"    {name} took {time.monotonic() - start:.0f} s", flush=True)
    if missing:
        print(f"failed, or no time was left: --only {','.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
