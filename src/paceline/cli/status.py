"""`paceline status`"""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="print the picture as JSON")
@click.option("--stacks", is_flag=True, help="print each rank's whole Python stack")
@click.option("--debug", is_flag=True, help="show tracebacks")
def status(run: str | None, as_json: bool, stacks: bool, debug: bool) -> None:
    """Show what each rank of a run does, and who waits for whom  [default: the newest in runs].

    RUN is the folder of a run: under way, finished, failed or killed. Ctrl-\\ on a running
    `paceline train` prints the same.

    \b
    Examples:
      paceline status
      paceline status runs/a --stacks
      paceline status runs/a --json | jq '.ranks[].doing'
    """
    from paceline.results.status import newest, read_status

    found = read_status(run if run is not None else newest())
    if as_json:
        click.echo(json.dumps(found.plain(), indent=2))
        return
    for line in found.lines(stacks):
        click.echo(line)
