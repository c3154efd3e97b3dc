"""A model folder's tokenizer, with its chat template."""

from __future__ import annotations

from typing import Any

from shims.errors import UsageError


def load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    """Load it.

    Args:
        folder: of the model.

    Raises:
        UsageError: no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UsageError(
            f"--model-path {folder}",
            "a folder with a tokenizer",
            " ".join(f"{type(error).__name__}: {error}".split()),
            "read the Python files it brings, then add --trust-remote-code"
            if "trust_remote_code" in str(error)
            else "complete the folder",
        ) from error
    if not tokenizer.chat_template:
        raise UsageError(
            f"--model-path {folder}",
            "a tokenizer with a chat template",
            "none in tokenizer_config.json or chat_template.jinja",
            "use the instruction-tuned variant of the model, or add its chat template",
        )
    _check_template(folder, tokenizer)
    return tokenizer


def _check_template(folder: str, tokenizer: Any) -> None:
    """A template that no conversation can be rendered with is the model's fault, not the first row's.

    Raises:
        UsageError: the template is not valid Jinja.
    """
    import jinja2

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(
            f"--model-path {folder}, chat template line {error.lineno}",
            "a valid Jinja template",
            str(error.message),
            "repair the chat template of the model folder",
        ) from error
    except Exception:  # noqa: BLE001
        return  # it may refuse this conversation; that is told row by row


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all special tokens, ascending: those with a role (end of sequence …), and those only added as special."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))
