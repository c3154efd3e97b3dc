"""The JSON schema of every stage's manifest; ``python -m pipeline.manifest_schema docs`` writes it and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SCHEMA_FILE = "manifest.schema.json"
PAGE_FILE = "manifest.md"

Schema = dict[str, Any]


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description} | more


def _number(description: str, kind: str = "integer", **more: Any) -> Schema:
    return {"type": kind, "description": description, "minimum": 0} | more


def _maybe(schema: Schema) -> Schema:
    return schema | {"type": [schema["type"], "null"]}


def _object(description: str, required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(required),
    }


def _hashes(description: str) -> Schema:
    return {"type": "object", "description": description, "additionalProperties": {"type": ["string", "null"]}}


_VERSIONS = {
    "type": "object",
    "description": "installed distributions whose behaviour reaches the data",
    "additionalProperties": {"type": "string"},
}
_PLAN = {
    "type": ["object", "null"],
    "description": "the adaptations in force, as `specshim plan --json` prints them",
}
_MODEL = _object(
    "the model folder",
    ("path", "fingerprint", "num_layers", "hidden_size", "vocab_size"),
    path=_text("as found"),
    fingerprint=_text("sha256 over the hashes of `files`", pattern="^[0-9a-f]{64}$"),
    files=_hashes("file -> sha256; of a weight file over 64 MiB: of its size, header, both ends and samples"),
    num_layers=_number("decoder layers"),
    hidden_size=_number("H"),
    vocab_size=_number("tokens of the target vocabulary"),
)
_LAYERS = _object(
    "which states a row holds; docs/layer_ids.md",
    ("ids", "convention", "native"),
    ids={"type": "array", "items": {"type": "integer"}, "description": "ascending, in `convention`"},
    convention={"enum": ["after", "native"], "description": "after i is R_{i+1}, native i is R_i"},
    native={"type": "array", "items": {"type": "integer"}, "description": "the same, in the native convention"},
)
_RUNS = {
    "type": "array",
    "description": "every run that wrote here, a killed one too (it has no `ended`)",
    "items": _object(
        "one run",
        ("stack", "started"),
        stack=_text("its entry in `stacks`"),
        started=_text("UTC, ISO 8601"),
        ended=_text("UTC, ISO 8601"),
        engine=_maybe(_text("which engine computed")),
        shard=_text("i/n; 1/1 is everything"),
        replica=_number("which of --replicas, from 1; each has a run of its own"),
        rows=_number("rows it wrote"),
        tokens=_number("tokens it computed"),
        seconds=_number("computing time, without loading the model", "number"),
    ),
}
_STACKS = {
    "type": "object",
    "description": "short hash -> what computed; the header of every row names its stack",
    "additionalProperties": _object(
        "a stack", versions=_VERSIONS, plan=_PLAN, engine=_maybe(_text("which engine computed"))
    ),
}
_BAD = {
    "type": "array",
    "description": "rows without states, because those were zero, constant or not finite",
    "items": _object("a row", ("row", "fault"), row=_number("index"), id=_text("id"), fault=_text("what was wrong")),
}
_HEAD: dict[str, Schema] = {
    "schema": {"const": 1, "description": "version of this schema"},
    "stage": _text("which command wrote it"),
    "specshim": _text("version of this tool"),
    "created": _text("UTC, ISO 8601"),
    "versions": _VERSIONS,
    "plan": _PLAN,
}
_ROWS: dict[str, Schema] = {
    "model": _MODEL,
    "engine": _maybe(_text("stock, direct or native")),
    "layers": _LAYERS,
    "last_state": {
        "enum": ["residual", "normed"],
        "description": "whether the last state is R_n or N = norm(R_n), where the last layer is among `layers`",
    },
    "dtype": {"enum": ["float32", "bfloat16", "float16"], "description": "what the states were computed in"},
    "store_dtype": {
        "enum": ["float32", "bfloat16", "float16", "float8_e4m3"],
        "description": "what they are stored in; float8_e4m3 has a float32 scale for each token and layer",
    },
    "chat_template_sha256": _maybe(_text("that of the prepared data")),
    "max_seq_len": _maybe(_number("--max-seq-len")),
    "row_limit": _maybe(_number("tokens kept per row, what the model's context allows included")),
    "format": _text("docs/formats.md"),
    "rows_per_file": _number("rows a file holds"),
    "inputs": {"type": "object", "description": "sha256 of what was read; a conversion adds what its source was"},
    "complete": {"type": "boolean", "description": "every row is there, or in `bad_rows`"},
    "counts": _object(
        "the data's",
        ("rows",),
        rows=_number("rows, bad ones included"),
        tokens=_number("tokens"),
        cut_rows=_number("rows cut to `row_limit`, ids and mask alike"),
        bad_rows=_number("entries of `bad_rows`"),
    ),
    "bad_rows": _BAD,
    "speed": _object("the last run's", tokens=_number("tokens"), seconds=_number("computing time", "number")),
    "runs": _RUNS,
    "stacks": _STACKS,
}
_STAGES: dict[str, tuple[tuple[str, ...], dict[str, Schema]]] = {
    "prepare": (
        ("model", "counts", "inputs"),
        {
            "model": _MODEL,
            "chat_template_sha256": _text("of the template's JSON text", pattern="^[0-9a-f]{64}$"),
            "max_seq_len": _number("tokens kept per row"),
            "thinking": {"enum": ["keep", "mask"], "description": "whether thinking is trained on"},
            "thinking_end": _text("where thinking ends, in a reply"),
            "duplicates": {"enum": ["drop", "keep", "refuse"], "description": "rows with an earlier row's tokens"},
            "special_token_ids": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "what `vocab` always keeps",
            },
            "counts": _object("rows, tokens, and what was left out", ("rows",), rows=_number("usable rows")),
            "skipped": {
                "type": "array",
                "items": {"type": "string"},
                "description": "file, place and reason of the first thousand rows left out",
            },
            "inputs": _hashes("sha256 of the conversations"),
            "outputs": _hashes("sha256 of the files written"),
        },
    ),
    "regenerate": (
        ("model", "inputs", "complete"),
        {
            "model": _MODEL,
            "dtype": _text("what the model answered in"),
            "temperature": _number("of sampling", "number"),
            "top_p": _number("of sampling", "number", maximum=1),
            "max_reply_tokens": _number("longest reply"),
            "max_model_len": _number("longest conversation, in tokens"),
            "seed": {"type": "integer", "description": "each reply's own is derived from it, its row and its turn"},
            "inputs": _hashes("sha256 of the questions"),
            "complete": {"type": "boolean", "description": "every question was asked"},
            "counts": _object("conversations, replies, and what was cut or left out"),
            "skipped": {"type": "array", "items": {"type": "string"}, "description": "rows left out, and why"},
            "runs": _RUNS,
            "stacks": _STACKS,
        },
    ),
    "vocab": (
        ("model", "draft_vocab_size", "outputs"),
        {
            "model": _MODEL,
            "draft_vocab_size": _number("tokens the draft can say"),
            "target_vocab_size": _number("tokens of the model"),
            "counts": _object(
                "how it was chosen",
                seen=_number("distinct trainable tokens"),
                special=_number("special tokens, kept in any case"),
                padded=_number("unseen ids added"),
                coverage=_number("share of the trainable tokens that the draft can say", "number", maximum=1),
            ),
            "inputs": _hashes("sha256 of token_freq.pt"),
            "outputs": _hashes("sha256 of the two arrays"),
        },
    ),
    "extract": (("model", "layers", "dtype", "row_limit", "inputs", "complete"), _ROWS),
    "convert": (
        ("model", "layers", "dtype", "inputs", "complete", "counts", "format"),
        _ROWS
        | {
            "exact": {"type": "boolean", "description": "nothing was rounded, normed or left out on the way here"},
            "source_sha256": _maybe(
                _text(
                    "of rows without manifest that this began with: names, sizes, times and ends of their files",
                    pattern="^[0-9a-f]{64}$",
                )
            ),
        },
    ),
    "train": (
        ("model", "complete"),
        {
            "model": _MODEL,
            "inputs": {"type": "object", "description": "of the states and the vocabulary; the draft begun with"},
            "auxiliary_layers_native": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "the layers that the draft names, for the server",
            },
            "draft_vocab_size": _number("tokens the draft can say"),
            "batches_per_step": _number("packed batches of one step, over all devices"),
            "complete": {"type": "boolean", "description": "the draft is there"},
            "outputs": _hashes("sha256 of the draft's files"),
            "steps": _number("optimizer steps"),
            "best_step": _number("the step whose draft is published"),
            "stopped": _text("why it ended before its last epoch"),
            "computed_in": _text("dtype of the computation, where `dtype` may be auto"),
            "metrics": {"type": "object", "description": "held out: before the first step, of the draft, at the end"},
            "adaptations": {"type": "array", "items": {"type": "string"}, "description": "what was bridged, and how"},
        },
    ),
}


def required_fields(stage: str) -> tuple[str, ...]:
    """What a reader of that stage's manifest counts on."""
    return _STAGES[stage][0] if stage in _STAGES else ()


def fields_of(stage: str) -> dict[str, Schema]:
    """The fields of that stage's manifest, and what each holds."""
    return _HEAD | (_STAGES[stage][1] if stage in _STAGES else {})


def schema() -> Schema:
    """The whole schema, draft 2020-12: the stage decides which fields there are."""
    cases = [
        {
            "if": {"properties": {"stage": {"const": stage}}},
            "then": {"required": list(required), "properties": fields},
        }
        for stage, (required, fields) in _STAGES.items()
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "specshim manifest",
        "type": "object",
        "properties": _HEAD | {"stage": {"enum": list(_STAGES), "description": _HEAD["stage"]["description"]}},
        "required": ["schema", "stage", "specshim", "created", "versions"],
        "allOf": cases,
    }


def page() -> str:
    """The schema for people."""
    lines = [
        "<!-- Written by `python -m pipeline.manifest_schema docs`; do not edit. -->",
        "# manifest.json",
        "",
        "Each stage writes what it did, with what, from what (`vocab` as `vocab-{size}.json`). The next stage compares",
        "the fields it depends on, and refuses a mismatch by name: field, wanted, found. The machine-readable form is",
        f"[{SCHEMA_FILE}]({SCHEMA_FILE}). A row's own header repeats whose row it is, names the stack that computed it",
        "and holds a sha256 over its numbers (docs/formats.md).",
        "",
        "A model is known by its fingerprint: config, tokenizer, chat template, Python files, indexes and all files of",
        "weights in its folder. Of a weight file of more than 64 MiB count its size, its header, 1 MiB at both ends,",
        "4 KiB at the start of each tensor (safetensors) and 4 KiB every 8 MiB. Earlier builds looked at less, so what",
        "they wrote names another fingerprint for the same model: it is not gone on with, and not used with the model.",
        "The refusal names `model.fingerprint`, what was wanted and found; run the stages again, from `prepare` on.",
        "",
        "## Every stage",
        "",
        *_table(_HEAD, ("schema", "stage", "specshim", "created", "versions")),
    ]
    for stage, (required, fields) in _STAGES.items():
        lines += ["", f"## {stage}", ""]
        if stage == "convert":
            lines.append("As `extract`, and:")
            lines.append("")
            fields = {name: field for name, field in fields.items() if name not in _ROWS}
        lines += _table(fields, required)
    return "\n".join(lines) + "\n"


def _table(fields: dict[str, Schema], required: tuple[str, ...]) -> list[str]:
    rows = ["| field | | |", "|---|---|---|"]
    for name, field in fields.items():
        rows.append(f"| `{name}` | {'always' if name in required else ''} | {_cell(field)} |")
        inner = field.get("items", field)
        inner = inner if inner.get("properties") else field.get("additionalProperties", {})
        for below, what in (inner.get("properties", {}) if isinstance(inner, dict) else {}).items():
            rows.append(f"| `{name}.{below}` | | {_cell(what)} |")
    return rows


def _cell(field: Schema) -> str:
    choices = f" ({', '.join(field['enum'])})" if "enum" in field else ""
    text = f"{field['description']}{choices}" if field.get("description") else ""
    return text.replace("|", "\\|")


def main() -> None:
    """Write schema and page into the folder named on the command line."""
    folder = Path(sys.argv[1])
    (folder / SCHEMA_FILE).write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    (folder / PAGE_FILE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
