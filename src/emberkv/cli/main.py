"""The command `emberkv`: one place where every failure becomes one line and an exit code.

    0 done   1 not now (unreachable, a miss, refused)   2 wrong arguments or configuration   130 Ctrl-C   143 SIGTERM

Laws: no traceback for anything that an operator can cause; what is heavy (numpy, torch, a node) is imported by the
command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from emberkv import __version__
from emberkv.cli import blocks, budget, drain, namespace, sim, status, tools, up
from emberkv.cli.output import emit_error
from emberkv.errors import ConfigError, EmberError, HandshakeRefused

app = typer.Typer(
    name="emberkv",
    help="A replicated cache of attention keys and values for LLM inference: it may lose, it never lies.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _room in (up, blocks, status, namespace, drain, budget, tools, sim):
    _room.register(app)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"emberkv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="emberkv", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        emit_error(error.format_message().rstrip(".") + hint)
        return 2
    except (ConfigError, HandshakeRefused) as error:
        emit_error(str(error))
        return 2
    except EmberError as error:
        emit_error(str(error))
        return 1


def main() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
