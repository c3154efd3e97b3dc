"""What decoder layers return, release by release: a layer of a new kind fails here until somebody has looked at it."""

from __future__ import annotations

import ast

import pytest

from contract_tests.sources import Settings, open_release
from shims.releases import known

# Layers that return something else than a tensor, (hidden states, residual) or (hidden states, None) of all
# devices, and what the capture does with them.
LOOKED_AT = {
    "HunYuanDecoderLayer": "keys and values beside the pair: read as a pair",
    "KimiDecoderLayer": "refused in Kimi-Linear, read as a tensor in Kimi-K3",
    "DeepseekV4DecoderLayer": "refused",
    "Glm5NextDecoderLayer": "refused",
    "InklingDecoderLayer": "refused",
    "Qwen4ExpDecoderLayer": "refused",
    "DeepseekV32DecoderLayer": "refused on several devices",
    "MiniMaxM3DecoderLayer": "refused on several devices",
}


def _odd(source: str) -> set[str]:
    found = set()
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("DecoderLayer")):
            continue
        for forward in (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "forward"):
            tuples = [r.value.elts for r in ast.walk(forward)
                      if isinstance(r, ast.Return) and isinstance(r.value, ast.Tuple)]  # fmt: skip
            plain = all(len(t) == 2 and ast.unparse(t[1]) in ("residual", "None") for t in tuples)
            if not plain or "fused_allreduce" in ast.unparse(forward):
                found.add(node.name)
    return found


@pytest.mark.network
@pytest.mark.parametrize("release", known())
def test_every_kind_of_layer_was_looked_at(release: str) -> None:
    tree = open_release("vllm", release, Settings.from_environment())
    paths = [
        p for p in tree.paths()
        if p.endswith(".py") and p.startswith(("vllm/models/", "vllm/model_executor/models/"))
        and not any(part in p for part in ("/xpu/", "mtp", "dflash", "dspark", "vision", "audio"))
    ]  # fmt: skip
    tree.prefetch(paths)
    odd = {name for path in paths for name in _odd(tree.read(path).decode())}
    tree.save()
    assert odd <= set(LOOKED_AT), sorted(odd - set(LOOKED_AT))
