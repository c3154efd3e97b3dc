"""The command line: `specshim STAGE …`, the same as `python -m pipeline STAGE …`.

Only parses, calls a stage and prints what it returns. Stages are imported when called, so
that `--help` and refusals need no deep-learning library.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from pipeline import config as options
from pipeline import last_word, refusal, training_launch
from pipeline.commands import extract_options as storing
from pipeline.commands import prepare_options as preparing
from pipeline.commands.check_draft import check_draft_command
from pipeline.commands.convert import convert
from pipeline.commands.evaluate import evaluate
from pipeline.commands.fetch import fetch
from pipeline.commands.regenerate import regenerate
from pipeline.commands.status import lines_of as status_lines
from pipeline.commands.train import train
from pipeline.object_store.address import shown
from shims.errors import SpecshimError, UsageError
from shims.explained import explained

app = typer.Typer(
    name="specshim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LISTS = ("--layer-ids", "--source-layer-ids", "--trained-layer-ids")
_DATA = "pip install 'specshim[data]'"
_INSTALLED_BY = {
    "vllm": "install vLLM, and speculators for the stock engine: `specshim plan` tells which pairs are known",
    "torch": "install torch, in the build that this machine needs",
    "speculators": "pip install 'specshim[train]'",
} | dict.fromkeys(("numpy", "safetensors", "transformers", "tokenizers", "jinja2", "datasets", "pyarrow"), _DATA)
"""Package that is yours to bring -> what brings it."""
_out = Console()
_err = Console(stderr=True)

ModelPath = Annotated[str, typer.Option(help="Model folder, or a hub name.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")
]
MaxSeqLen = Annotated[int, typer.Option(help="Tokens kept per row.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from pipeline.manifest import tool_version

        typer.echo(f"specshim {tool_version()}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Hidden states from speculators' generator on any vLLM, and an EAGLE-3 draft trained on them."""


@app.command()
def prepare(
    model_path: ModelPath,
    input: Annotated[
        Path,
        typer.Option(help="Conversations: JSONL, Parquet, a folder of these, or a saved Hugging Face data set."),
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder for the prepared data.")],
    max_seq_len: MaxSeqLen = options.DEFAULT_MAX_SEQ_LEN,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out unusable rows and list them.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    split: preparing.Split = None,
    thinking: preparing.Thinking = "keep",
    thinking_end: preparing.ThinkingEnd = "</think>",
    duplicates: preparing.Duplicates = "drop",
    workers: preparing.Workers = 1,
    preview: preparing.Preview = 0,
) -> None:
    """Tokenize conversations, and mask what the assistant wrote."""
    from pipeline import prepare as stage

    config = options.PrepareConfig(
        model_path, input, output_dir, max_seq_len, skip_bad, trust_remote_code, split, thinking, thinking_end,
        duplicates, workers,
    )  # fmt: skip
    if preview:
        tokenizer, rows = stage.first_rows(config, preview)
        for row in rows:
            shown = preparing.shown(tokenizer, row, _out.is_terminal)
            _out.print(shown, highlight=False, soft_wrap=True)
        return
    result = stage.prepare(config)
    for line in result.skipped[:10]:
        _err.print(f"skipped {escape(line)}", highlight=False, soft_wrap=True)
    if len(result.skipped) > 10:
        _err.print(f"… and more; {output_dir}/manifest.json lists them", highlight=False)
    for line in preparing.lines_of(result, max_seq_len, output_dir):
        _print(line)


@app.command()
def vocab(
    prepared: Annotated[Path, typer.Option(help="Folder written by `prepare`.")],
    draft_vocab_size: Annotated[int, typer.Option(help="Tokens the draft can say.")],
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder for the mapping, d2t and t2d (default: the prepared folder).")
    ] = None,
) -> None:
    """Choose the draft's vocabulary: the assistant's most used tokens."""
    from pipeline.vocab import build_vocab

    result = build_vocab(options.VocabConfig(prepared, draft_vocab_size, output_dir))
    _print(
        f"{result.draft_vocab_size} of {result.target_vocab_size} tokens "
        f"({result.seen} seen, {result.special} special, {result.padded} padded), "
        f"covering {result.coverage:.2%} of the assistant's tokens -> {output_dir or prepared}"
    )


@app.command()
def extract(
    model_path: ModelPath,
    prepared_data: Annotated[Path, typer.Option(help="tokenized_data.jsonl of `prepare`.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the hidden states, or s3://BUCKET/FOLDER.")],
    batch_size: Annotated[int, typer.Option(help="Rows handed to the engine at once.")] = 4,
    max_seq_len: MaxSeqLen = options.DEFAULT_MAX_SEQ_LEN,
    tp_size: Annotated[int, typer.Option(help="GPUs to spread the model over.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of device memory for vLLM.")] = 0.80,
    layer_ids: Annotated[
        list[int] | None,
        typer.Option(help="Layers, e.g. --layer-ids 2 30 58 60. Default: what vLLM serves, and the last layer."),
    ] = None,
    layer_convention: Annotated[
        str, typer.Option(help="after: id i is after layer i; native: before layer i.")
    ] = "after",
    engine: Annotated[
        str,
        typer.Option(
            help="direct: prefill on vLLM's public API, rows written by its worker; stock: speculators' own "
            "generator; native: vLLM's extract_hidden_states; auto: direct where that was run and right."
        ),
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; auto is float32 on a CPU.")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    format: storing.FormatName = "hs_safetensors",
    rows_per_file: storing.RowsPerFile = 1000,
    store_dtype: storing.StoreDtype = "auto",
    vocab: storing.VocabFolder = None,
    max_bad: storing.MaxBad = 0,
    preflight: storing.Preflight = 0,
    preflight_against: storing.PreflightAgainst = "transformers",
    shard: storing.ShardOf = None,
    min_free: storing.MinFree = 1.0,
    ignore_space: storing.IgnoreSpace = False,
    check_content: storing.CheckContent = False,
    enforce_eager: Annotated[
        bool | None,
        typer.Option("--enforce-eager/--compile", help="direct: run uncompiled (default: on a CPU only)."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="direct: tokens of one step (default: vLLM's).")
    ] = None,
    replicas: storing.Replicas = None,
    ray_address: storing.RayAddress = "local",
    max_restarts: storing.MaxRestarts = 10,
    status: storing.StatusOnly = False,
) -> None:
    """Compute hidden states; run it again to go on where it stopped."""
    from pipeline import extract as stage

    ids = tuple(layer_ids) if layer_ids else None
    config = options.ExtractConfig(
        model_path, prepared_data, output_dir, batch_size, max_seq_len, tp_size, gpu_memory_utilization,
        ids, layer_convention, engine, dtype, trust_remote_code, format, rows_per_file, store_dtype, vocab,
        max_bad, preflight, preflight_against, shard, min_free, ignore_space, check_content,
        enforce_eager, max_num_batched_tokens, replicas, ray_address, max_restarts,
    )  # fmt: skip
    if status:
        for line in status_lines(stage.status(config), output_dir):
            _print(line)
        return
    result = stage.extract(config)
    computed = result.computed_rows
    speed = (
        f" in {result.seconds:.1f} s, {result.computed_tokens / result.seconds:.0f} tokens/s" if result.seconds else ""
    )
    _print(f"{result.rows} rows, {result.tokens} tokens -> {shown(output_dir)}")
    done = [f"{computed} rows computed{speed}"]
    done += [f"{result.kept_rows} found finished"] if result.kept_rows else []
    done += [f"{result.redone_rows} of them redone, being damaged"] if result.redone_rows else []
    _print(", ".join(done))
    if result.cut_rows:
        _print(f"{result.cut_rows} rows are stored cut, ids and mask alike")
    if result.bad_rows:
        _print(f"{result.bad_rows} rows left out: their states cannot be right (bad_rows*.jsonl names them)")
    if result.restarts:
        _print(f"{result.restarts} replicas died and were replaced")
    if not result.complete:
        _print("rows of other shards are still missing")


app.command()(convert)
app.command()(fetch)
app.command()(regenerate)
app.command()(train)
app.command("check-draft")(check_draft_command)
app.command()(evaluate)


@app.command()
def verify(
    data: Annotated[Path, typer.Argument(help="Folder written by `extract`, or s3://BUCKET/FOLDER.")],
    model: Annotated[str | None, typer.Option(help="The model the states came from.")] = None,
    sample: Annotated[int, typer.Option(help="Rows to recompute.")] = 8,
    seed: Annotated[int, typer.Option(help="Which rows.")] = 0,
    structure: Annotated[bool, typer.Option("--structure", help="Check the files alone, no model.")] = False,
    threshold: Annotated[float | None, typer.Option(help="Largest accepted relative error.")] = None,
    prepared_data: Annotated[
        Path | None, typer.Option(help="Compare token ids with this tokenized_data.jsonl.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the reference runs.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check the files, and recompute some rows with transformers. Exit code 1: not to be trained on."""
    from pipeline.verify import verify as run

    result = run(
        options.VerifyConfig(data, model, sample, seed, structure, threshold, prepared_data, device, trust_remote_code)
    )
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    else:
        if result.compared:
            _out.print(result.table())
        _print(f"{result.rows} rows, {result.tokens} tokens, layers {result.layers}")
        for fault in result.faults[:10]:
            _err.print(f"wrong: {escape(fault)}", highlight=False, soft_wrap=True)
        if len(result.faults) > 10:
            _err.print(f"… and {len(result.faults) - 10} more", highlight=False)
        _print(result.verdict())
    if result.faults:
        raise typer.Exit(1)


@app.command()
def report(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Describe the running environment and what the shims do in it."""
    import shims

    _show(shims.report(), as_json)


@app.command()
def plan(
    vllm: Annotated[str | None, typer.Option(help="A vLLM release, e.g. 0.16.0 (default: the installed one).")] = None,
    speculators: Annotated[str | None, typer.Option(help="A speculators release.")] = None,
    transformers: Annotated[str | None, typer.Option(help="A transformers release.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the adaptations for a stack, installed or not."""
    import shims

    _show(shims.plan(vllm=vllm, speculators=speculators, transformers=transformers), as_json)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="TARGET… [OPTIONS]",
)
def gate(context: typer.Context) -> None:
    """Judge a vLLM upgrade from its sources, before anything is installed."""
    from contract_tests.gate.__main__ import main as run

    raise typer.Exit(run(context.args, "specshim gate"))


def _show(described: Any, as_json: bool) -> None:
    typer.echo(json.dumps(described.as_dict()) if as_json else described.render())


def _print(text: str) -> None:
    _out.print(escape(text), highlight=False, soft_wrap=True)


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """Turn ``--layer-ids 2 30 58`` into one option per number, as the parser wants it."""
    spread: list[str] = []
    position = 0
    while position < len(arguments):
        argument, equals, first = arguments[position].partition("=")
        position += 1
        if argument not in _LISTS:
            spread.append(argument + equals + first)
            continue
        given = [first] if equals else []
        while position < len(arguments) and not arguments[position].startswith("--"):
            given.append(arguments[position])
            position += 1
        numbers = [part for text in given for part in text.split(",") if part.strip()]
        wrong = [part for part in numbers if not re.fullmatch(r"[-+]?[0-9]{1,9}", part.strip())]
        if wrong or not numbers:
            raise UsageError(
                argument,
                f"whole numbers, e.g. {argument} 2 30 58 60",
                repr(wrong[0]) if wrong else "nothing",
                "give the layers as numbers",
            )
        spread += [f"{argument}={number.strip()}" for number in numbers]
    return spread


def refuse_empty_values(arguments: Sequence[str]) -> None:
    """An empty path would mean the current folder; it is nearly always an unset variable of a script.

    Raises:
        UsageError: an argument is empty.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        if not argument or (flag.startswith("--") and equals and not value):
            raise UsageError(
                (before or "the first argument") if not argument else flag,
                "a value",
                "an empty text",
                "give the value; a variable of your script may be unset",
            )


class Stopped(BaseException):
    """A signal asked this process to end; raised so that every stage can end its own processes."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn the signals that ask to end into :class:`Stopped`; the second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    # One that is ignored (nohup, a background job) stays ignored.
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _missing(error: ModuleNotFoundError) -> SpecshimError | None:
    """A refusal in place of a traceback, where a package is not installed that only some stages need."""
    package = (error.name or "").partition(".")[0]
    step = _INSTALLED_BY.get(package)
    if step is None or importlib.util.find_spec(package) is not None:
        return None
    return SpecshimError("this environment", f"the package {package}, which this command needs", "not installed", step)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point.

    Exit code 0: done; 2: the request was wrong, nothing changed; 1: it failed; 128 + n: signal n.
    """
    refusal.end_if_told()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal may not know every letter
    try:
        with last_word.ours(process_ends=arguments is None), _signals_raise():
            refuse_empty_values(given)
            if training_launch.wanted(given):
                training_launch.launch(given[1:])
                return
            app(spread_lists(given))
    except Stopped as stop:
        name = signal.Signals(stop.number).name
        _complain(f"stopped by {name}; what is finished is kept: the same command goes on from there")
        sys.exit(128 + stop.number)
    except SystemExit as end:  # the parser's own
        if end.code == refusal.EXIT_CODE:
            refusal.tell()
        raise
    except SpecshimError as error:
        _complain(str(error))
        if isinstance(error, UsageError):
            refusal.tell(error)
            sys.exit(refusal.EXIT_CODE)
        _complain(f"the command was: {shlex.join(['specshim', *given])}")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  the last place where a message can be made
        told = _missing(error) if isinstance(error, ModuleNotFoundError) else explained(error)
        if told is None:
            _complain(traceback.format_exc())
        _complain(str(told or f"failed: {type(error).__name__}: {str(error).strip() or 'no message'}"))
        sys.exit(1)


def _complain(text: str) -> None:
    _err.print(escape(text), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
