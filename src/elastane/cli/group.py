"""The `elastane` command: its subcommands, its version, and how errors are shown.

Knows the commands by name; nothing of what they do.
"""

from __future__ import annotations

import click

from elastane._version import __version__
from elastane.cli.control import ps, scale, status, stop
from elastane.cli.plot import plot
from elastane.cli.run import run
from elastane.errors import ArgumentError, ElastaneError


class RefusedArgument(click.ClickException):
    """An argument that the library refused, in one line without click's usage text."""

    exit_code = 2


class ElastaneGroup(click.Group):
    """Shows the errors of every command in one line: exit code 2 for arguments, 1 for others."""

    # Click's own way to surround all commands is to override `invoke`.
    def invoke(self, ctx: click.Context) -> object:
        """Run the command; turn expected errors into click's."""
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            raise RefusedArgument(str(error)) from error
        except BrokenPipeError:
            raise  # click ends quietly when the reader of a pipe is gone
        except (ElastaneError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=ElastaneGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s", prog_name="elastane")
def main() -> None:
    """Elastic distributed training for PyTorch."""


main.add_command(plot)
main.add_command(run)
main.add_command(scale)
main.add_command(status)
main.add_command(stop)
main.add_command(ps)
