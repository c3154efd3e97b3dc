"""A training in small, for the launchers: every process adds up the ranks, the first writes what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
if "--fail" in sys.argv:
    sys.exit(3)
if "--wait" in sys.argv:
    Path(sys.argv[1]).with_suffix(f".{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(600)
if dist.get_rank() == 0:
    seen = {
        "size": dist.get_world_size(),
        "total": int(total),
        "local": os.environ["LOCAL_RANK"],
        "given": sys.argv[2:],
    }
    Path(sys.argv[1]).write_text(json.dumps(seen))
dist.destroy_process_group()
