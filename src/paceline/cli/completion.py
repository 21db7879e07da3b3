"""`paceline completion`"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from paceline.cli.groups import Choice


@click.command()
@click.argument("shell", type=Choice("shell", ["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell: bash, zsh or fish.

    \b
    Examples:
      eval "$(paceline completion bash)"                                  (in ~/.bashrc)
      paceline completion fish > ~/.config/fish/completions/paceline.fish
    """
    from paceline.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "paceline", "_PACELINE_COMPLETE").source())
