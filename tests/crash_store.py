"""`crash.py` with a real S3 server (moto's) in place of a folder.

``python tests/crash_store.py --points 60``; `nox -s crash` runs it, too. What has to hold is the same: a row that was
seen in the store is not computed again, and the finished set equals the undisturbed one. Each round begins on the
machine on which the one before it was killed, with nothing but the objects left of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import crash
from crash import LoggingEngine, Place, Trial
from s3_server import BUCKET, client, environment, objects, running

from pipeline import extract as extract_module

FORMS = ("hs_safetensors", "speculators-0.4", "speculators-0.8")
# The lines between two requests are what matters here.
crash.WRITING_MODULES = (*crash.WRITING_MODULES, "beside.py", "bucket.py", "lock.py", "rows.py", "target.py")


class StoreTrial(Trial):
    """The same with rows at an address."""

    def folder(self, name: str) -> Path:
        """See :class:`crash.Trial`."""
        return Path(f"s3://{BUCKET}/{name}")

    def remove(self, folder: Path) -> None:
        """See :class:`crash.Trial`."""
        for name in objects(f"{folder.name}/"):
            client().delete_object(Bucket=BUCKET, Key=f"{folder.name}/{name}")

    def seen(self, folder: Path) -> Path:
        """A copy; made by a client of our own."""
        copy = self._place.root / "seen"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, content in objects(f"{folder.name}/").items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
        return copy


def main() -> int:
    """Exit code 1 when anything was found."""
    import torch

    parser = argparse.ArgumentParser(description="Kill extractions into an object store at random points.")
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=FORMS, help="formats; they share the points")
    options = parser.parse_args()
    torch.set_num_threads(1)
    extract_module.open_engine = lambda name, engine_options: LoggingEngine(engine_options)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="crash-store-") as root, running() as endpoint:
        os.environ.update(environment(endpoint))
        client().create_bucket(Bucket=BUCKET)
        place = Place(Path(root))
        for form in options.only:
            choose = random.Random(f"{form} {options.seed}")
            trial = StoreTrial(place, form, choose)
            while sum(trial.outcome.kills.values()) < -(-options.points // len(options.only)):
                trial.set_under_fire(choose.randint(2, 6), 1)
            outcomes.append(trial.outcome)
            print(json.dumps(vars(trial.outcome)), flush=True)
    total = sum(sum(outcome.kills.values()) for outcome in outcomes)
    bad = [outcome.format for outcome in outcomes if outcome.faults or outcome.rows_computed_again]
    print(f"{total} kills, {sum(o.sets for o in outcomes)} sets verified and compared; wrong: {bad or 'none'}")
    return int(bool(bad) or total < options.points)


if __name__ == "__main__":
    sys.exit(main())
