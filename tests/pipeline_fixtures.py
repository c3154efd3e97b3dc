"""Small stand-ins shared by the pipeline's tests: a tokenizer, a model folder, an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

import shims  # noqa: F401  without it, speculators 0.4 cannot be imported beside a newer transformers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>"]


class CharTokenizer:
    """One token a character, special tokens whole; with or without offsets, like the real kinds."""

    def __init__(
        self, template: str, specials: Sequence[str] = SPECIALS, fast: bool = True, glue_spaces: bool = False
    ) -> None:
        self.chat_template, self.is_fast, self.all_special_tokens = template, fast, list(specials)
        self._glue = glue_spaces
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

        environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # as transformers renders it

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        self._template = environment.from_string(template)

    def apply_chat_template(
        self, messages: Any, tools: Any = None, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        assert add_special_tokens is False, "the template has written the special tokens already"
        pieces = self.split(text)
        result: dict[str, Any] = {"input_ids": [hash(text[a:b]) % 1000003 for a, b in pieces]}
        if return_offsets_mapping:
            assert self.is_fast
            result["offset_mapping"] = pieces
        return result

    def split(self, text: str) -> list[tuple[int, int]]:
        pieces, at = [], 0
        while at < len(text):
            special = next((token for token in self.all_special_tokens if text.startswith(token, at)), None)
            length = len(special) if special else 1
            if not special and self._glue and text[at] == " " and at + 1 < len(text) and text[at + 1].isalnum():
                length = 2
            pieces.append((at, at + length))
            at += length
        return pieces


def masked_text(tokenizer: CharTokenizer, messages: Sequence[dict[str, Any]], mask: Sequence[int]) -> str:
    """The characters under the mask, spans separated by a bar."""
    text = tokenizer.apply_chat_template(list(messages))
    out, previous = "", 0
    for (start, end), bit in zip(tokenizer.split(text), mask, strict=True):
        out += ("|" if bit and not previous and out else "") + (text[start:end] if bit else "")
        previous = bit
    return out


def write_model(folder: Path, *, layers: int = 8, hidden: int = 4, template: str = CHATML, seed: str = "a") -> Path:
    """A folder with config.json and a byte-level tokenizer; weights are a few bytes that no test loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}" + seed.encode())
    return folder


def write_conversations(path: Path, count: int = 6) -> Path:
    """ShareGPT and messages rows by turns, all different."""
    rows = []
    for index in range(count):
        question, reply = f"what is {index} plus {index}?", f"it is {2 * index}, of course" + "!" * index
        if index % 2:
            rows.append(
                {
                    "id": f"s{index}",
                    "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": reply}],
                }
            )
        else:
            rows.append(
                {
                    "id": f"m{index}",
                    "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}],
                }
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class FakeEngine:
    """States that depend on the token ids and layers alone, so any run of a row is the same."""

    def __init__(self, options: Any, fail_at: int | None = None, spoil: Callable[[Any], Any] | None = None) -> None:
        self._options, self._fail_at, self._spoil = options, fail_at, spoil
        self.rows_computed = 0

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        import torch

        out = []
        for row in rows:
            if self._fail_at is not None and self.rows_computed >= self._fail_at:
                raise TimeoutError
            self.rows_computed += 1
            ids = torch.tensor(list(row), dtype=torch.float32)[:, None, None]
            layers = torch.tensor(self._options.layers.native, dtype=torch.float32)[None, :, None]
            columns = torch.arange(self._options.model.hidden_size, dtype=torch.float32)[None, None, :]
            states = ids + 1000 * layers + 0.5 * columns
            out.append(self._spoil(states) if self._spoil else states)
        return out

    def close(self) -> None:
        pass


def write_weights(folder: Path, seed: int = 0) -> None:
    """Give a model folder real random weights, with a final norm far from one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
        elif name == "model.norm.weight":
            torch.nn.init.uniform_(weight, 0.2, 5.0)
    model.save_pretrained(folder)


class ReferenceEngine:
    """Right states of a real tiny model, from transformers: what a flawless engine would return."""

    def __init__(self, options: Any) -> None:
        from pipeline.reference import Reference

        self._reference = Reference(
            options.model, options.layers, weights_dtype="float32", device="cpu", trust_remote_code=False
        )

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        return [self._reference.states(row)[0] for row in rows]

    def close(self) -> None:
        pass


def held(step: int) -> str:
    """Code of a `specshim` whose training waits for its kill behind a step: whoever kills may come late."""
    return f"""
import sys, time
from pipeline.__main__ import main
from pipeline.training_metrics import MetricsLog
write = MetricsLog._write
def write_and_wait(log, line):
    write(log, line)
    while line["kind"] == "train" and line["step"] == {step}:
        time.sleep(1)
MetricsLog._write = write_and_wait
main(sys.argv[1:])
"""


def write_states(
    root: Path,
    *,
    rows: int = 12,
    hidden: int = 64,
    layers: int = 8,
    draft: int = 64,
    ids: tuple[int, ...] | None = None,
) -> Path:
    """A tiny real model, prepared rows, a vocabulary and right states in float32; returns the model's folder."""
    from pipeline import extract as extract_module
    from pipeline.config import ExtractConfig, PrepareConfig, VocabConfig
    from pipeline.prepare import prepare
    from pipeline.vocab import build_vocab

    model = write_model(root / "model", hidden=hidden, layers=layers)
    write_weights(model)
    write_conversations(root / "conversations.jsonl", count=rows)
    prepare(PrepareConfig(str(model), root / "conversations.jsonl", root / "prepared"))
    build_vocab(VocabConfig(root / "prepared", draft))
    table, own = root / "prepared" / "tokenized_data.jsonl", extract_module.open_engine
    extract_module.open_engine = lambda name, options: ReferenceEngine(options)
    try:
        extract_module.extract(
            ExtractConfig(str(model), table, root / "states", dtype="float32", engine="stock", layer_ids=ids)
        )
    finally:
        extract_module.open_engine = own
    return model
