"""`specshim train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.config import TrainConfig

# The defaults shown are those of TrainConfig; what a flag does not give may come from a file or a recipe.
_DEFAULT: dict[str, Any] = {name: field.default for name, field in TrainConfig.__dataclass_fields__.items()}
Folder = Path | None


def _option(text: str, **options: Any) -> Any:
    return typer.Option(help=text, **options)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def train(
    context: typer.Context,
    data: Annotated[Folder, _option("Folder written by `extract`, or s3://BUCKET/FOLDER.")] = None,
    vocab: Annotated[Folder, _option("Folder written by `vocab`.")] = None,
    model: Annotated[str | None, _option("The model the states came from (the verifier).")] = None,
    output_dir: Annotated[Folder, _option("Folder for the draft, metrics and checkpoints.")] = None,
    config: Annotated[Folder, _option("TOML or YAML file with flags as names; flags override it.")] = None,
    recipe: Annotated[str | None, _option("smoke, small or kimi-k2.5: settings to begin with.")] = None,
    epochs: Annotated[int, _option("Passes over the data.")] = _DEFAULT["epochs"],
    max_steps: Annotated[int, _option("End after so many steps (0: after the last epoch).")] = _DEFAULT["max_steps"],
    lr: Annotated[float, _option("Peak learning rate.")] = _DEFAULT["lr"],
    scheduler: Annotated[str, _option("How it falls: linear, cosine or none.")] = _DEFAULT["scheduler"],
    warmup_steps: Annotated[int | None, _option("Steps in which it rises (default: a hundredth of all).")] = None,
    max_seq_len: Annotated[int, _option("Tokens in a packed batch.")] = _DEFAULT["max_seq_len"],
    accumulate: Annotated[int, _option("Packed batches of one step on each device.")] = _DEFAULT["accumulate"],
    device: Annotated[str, _option("auto, cpu, cuda or cuda:N.")] = _DEFAULT["device"],
    dtype: Annotated[str, _option("To compute in: auto, float32 or bfloat16.")] = _DEFAULT["dtype"],
    draft_dtype: Annotated[str, _option("Of the published weights.")] = _DEFAULT["draft_dtype"],
    fsdp: Annotated[bool, _option("Under torchrun: spread the draft over the devices.")] = _DEFAULT["fsdp"],
    workers: Annotated[
        int | None, _option("Processes that read rows ahead, for each device (default: up to 4 beside a GPU).")
    ] = None,
    ttt_steps: Annotated[int, _option("Draft tokens predicted in a chain.")] = _DEFAULT["ttt_steps"],
    ttt_step_loss_decay: Annotated[float, _option("Weight of each further draft token.")] = _DEFAULT[
        "ttt_step_loss_decay"
    ],
    num_layers: Annotated[int, _option("Decoder layers of the draft.")] = _DEFAULT["num_layers"],
    init_from: Annotated[Folder, _option("An EAGLE-3 draft to begin with.")] = None,
    accept_differences: Annotated[bool, _option("Begin with it although it was trained on other layers.")] = _DEFAULT[
        "accept_differences"
    ],
    val_share: Annotated[float, _option("Share of rows held out.")] = _DEFAULT["val_share"],
    val_steps: Annotated[int, _option("Steps between validations (0: each epoch).")] = _DEFAULT["val_steps"],
    patience: Annotated[int, _option("End after so many validations without a better one (0: never).")] = _DEFAULT[
        "patience"
    ],
    save_steps: Annotated[int, _option("Steps between checkpoints (0: each epoch).")] = _DEFAULT["save_steps"],
    keep_checkpoints: Annotated[int, _option("Checkpoints kept.")] = _DEFAULT["keep_checkpoints"],
    noise_std: Annotated[float, _option("Noise on the auxiliary states while training.")] = _DEFAULT["noise_std"],
    seed: Annotated[int, _option("Of split, order, noise and initial weights.")] = _DEFAULT["seed"],
    tensorboard: Annotated[bool, _option("Write TensorBoard event files.")] = _DEFAULT["tensorboard"],
    cache_dir: Annotated[Folder, _option("Where rows of an s3:// address are kept.")] = None,
    cache_gib: Annotated[float, _option("How much of them.")] = _DEFAULT["cache_gib"],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")
    ] = False,
) -> None:
    """Train an EAGLE-3 draft with speculators' own model and trainer.

    Run it again to go on where it stopped. On several devices or machines: see `specshim train --nnodes 1 --help`.
    """
    from pipeline.config_file import merged
    from pipeline.train import train as run
    from pipeline.training_recipes import RECIPES

    # Some releases of typer turn text into paths only in the call, not in the context.
    values = {**context.params, "data": data, "vocab": vocab, "output_dir": output_dir, "init_from": init_from}
    given = {name: value for name, value in values.items() if name in _DEFAULT and _is_given(context, name)}
    result = run(merged(TrainConfig, given, config, recipe, RECIPES))
    if result.first:
        for line in result.summary():
            typer.echo(line)
