"""`cllm export-tokenizer`: write a model's tokenizer in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.cli import completion
from cllm.cli.options import MODEL_HELP


def export_tokenizer(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] DIR",
            help=f"{MODEL_HELP} DIR is the directory to write to.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ],
) -> None:
    """Export a model's tokenizer as a Hugging Face directory, for load testers and other tools that count tokens."""
    from cllm.cli.options import load_settings
    from cllm.errors import CLLMError
    from cllm.loading.backend_choice import open_model_file
    from cllm.models.hf_directory import HFModel
    from cllm.text.export import export_tokenizer as export
    from cllm.text.hf_tokenizer import load_hf_chat_template
    from cllm.text.template_source import load_chat_template

    if len(names) > 2:
        raise CLLMError(f"export-tokenizer takes a model and a directory, not {len(names)} arguments")
    flags = {"model.name": names[0]} if len(names) == 2 else {}
    model = open_model_file(load_settings(None, None, flags).config)
    template = load_hf_chat_template(model) if isinstance(model, HFModel) else load_chat_template(model)
    for path in export(model, template, Path(names[-1])):
        typer.echo(path)
