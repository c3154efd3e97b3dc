"""`python -m pipeline.scale`: how long an extraction takes, simulated; the defaults are Kimi-K2.5's (docs/scale.md)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline import disk
from pipeline.duration import words
from pipeline.scale.plan import Prices, gpu_cost, month_cost, objects
from pipeline.scale.simulation import Outcome, Setup, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the outcome for the numbers given."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.scale", description=__doc__)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gpus", type=int, default=8, help="of one replica")
    parser.add_argument("--tokens-per-s", type=float, default=34000, help="of one replica")
    parser.add_argument("--bytes-per-token", type=float, default=57344, help="on disk; float8 halves it")
    parser.add_argument("--storage-gb-per-s", type=float, default=5.0, help="shared by all machines; 10^9 bytes")
    parser.add_argument("--start-s", type=float, default=900, help="until a replica is ready")
    parser.add_argument("--mtbf-days", type=float, default=10.0, help="of one replica")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--rows-per-file", type=int, default=1000)
    parser.add_argument("--trainer-tokens-per-s", type=float, default=0.0, help="of a trainer that reads along")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    prices = Prices()
    for replicas in given.replicas:
        setup = Setup(
            tokens=given.tokens,
            replicas=replicas,
            tokens_per_s=given.tokens_per_s,
            bytes_per_token=given.bytes_per_token,
            storage_bytes_per_s=given.storage_gb_per_s * 1e9,
            chunk_tokens=given.rows_per_file * given.row_tokens,
            start_s=given.start_s,
            mtbf_s=given.mtbf_days * 86400,
            lost_tokens=16384,
            trainer_tokens_per_s=given.trainer_tokens_per_s,
            seed=given.seed,
        )
        outcome = simulate(setup)
        size = given.tokens * given.bytes_per_token
        print(
            f"{replicas} replicas on {replicas * given.gpus} GPUs: {words(outcome.seconds)}, "
            f"{limit_of(outcome)}, {outcome.failures} failures, busy {outcome.busy_share:.0%}; "
            f"${gpu_cost(outcome.seconds, replicas * given.gpus, prices):,.0f} of GPU time; "
            f"{disk.human(size)} in {objects(given.tokens, given.row_tokens, given.rows_per_file)} files, "
            f"${month_cost(size, prices):,.0f} a month"
            + (f"; trained on once after {words(outcome.trained_s)}" if outcome.trained_s else "")
        )
    return 0


def limit_of(outcome: Outcome) -> str:
    """What set the pace, in words."""
    parts = {
        "starting": outcome.seconds - outcome.computing_s,
        "storage": outcome.storage_bound_s,
        "computing": outcome.computing_s - outcome.storage_bound_s,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name} is {parts[name] / outcome.seconds:.0%} of the time"


if __name__ == "__main__":
    raise SystemExit(main())
