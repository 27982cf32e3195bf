"""A click command that knows how other tools spell an option, and says why an option that it knows does not apply."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from adx.cli.output import Output
from adx.export.interrupt import interruptible

Values = Mapping[str, Any]
Run = Callable[[Values, Output], int]  # returns the exit code
Sections = Mapping[str, Sequence[click.Option]]

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@dataclass(frozen=True)
class Spelling:
    """What a command understands beside its own options.

    Attributes:
        aliases: another tool's option, by which of ours it means.
        values: per option of ours, another tool's value by which of ours it means (lower case).
        unavailable: an option that users know, by the reason why it cannot be used here.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)


def common_options() -> tuple[click.Option, ...]:
    """The options of `adx` itself that every command takes too."""
    return (
        click.Option(["-v", "--verbose"], is_flag=True, help="Say more on stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Say nothing on stderr but errors."),
        click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
    )


class AdxCommand(click.Command):
    """One command: its options as data, and the function that it calls with their values."""

    def __init__(
        self,
        name: str,
        run: Run,
        *,
        help: str,
        sections: Sections,
        arguments: Sequence[click.Argument] = (),
        spelling: Spelling | None = None,
    ) -> None:
        json_option = click.Option(["--json"], is_flag=True, help="Print exactly one JSON object on stdout.")
        self.sections: Sections = {**sections, "Output": (json_option, *common_options())}
        options = [option for group in self.sections.values() for option in group]
        super().__init__(name, params=[*arguments, *options], help=help, context_settings=HELP)
        self.run = run
        self.spelling = spelling or Spelling()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell the arguments our way, then parse them."""
        return super().parse_args(ctx, list(self.spelled(args, ctx)))

    def invoke(self, ctx: click.Context) -> int:
        """Call the command's function with the values of its options."""
        values = {**ctx.params, **{name: True for name, on in (ctx.obj or {}).items() if on}}
        if values["verbose"] and values["quiet"]:
            raise click.UsageError("--verbose and --quiet exclude each other", ctx)
        with interruptible(), Output(json=values["json"], level=values["verbose"] - values["quiet"]) as output:
            return self.run(values, output)

    def spelled(self, args: Sequence[str], ctx: click.Context) -> Iterator[str]:
        """The arguments with every option and value in adx's own spelling.

        Raises:
            click.UsageError: an option that is unknown, or known and of no effect here.
        """
        flags = {
            name: option.is_flag for option in self.options(ctx) for name in (*option.opts, *option.secondary_opts)
        }
        rest = iter(args)
        for token in rest:
            if token == "--":
                yield token
                yield from rest
            elif token.startswith("--"):
                given, equals, value = token.partition("=")
                name = self.option_name(given, flags, ctx)
                if equals:
                    yield f"{name}={self.value_name(name, value)}"
                else:
                    yield name
                    yield from self.value_of(name, flags, rest)
            elif flags.get(token[:2]) is False:  # -t 2 and -t2
                yield token[:2]
                yield from (self.value_name(token[:2], token[2:]),) if token[2:] else self.value_of(token, flags, rest)
            else:
                yield token

    def value_of(self, option: str, flags: Mapping[str, bool], rest: Iterator[str]) -> Iterator[str]:
        """Our name of the value that follows an option, if it takes one."""
        if not flags[option]:
            for value in rest:
                yield self.value_name(option, value)
                return

    def option_name(self, given: str, flags: Mapping[str, bool], ctx: click.Context) -> str:
        """Our name of a long option."""
        name = given.replace("_", "-")
        for spelling in (given, name):
            if spelling in flags:
                return spelling
            if spelling in self.spelling.aliases:
                return self.spelling.aliases[spelling]
            if spelling in self.spelling.unavailable:
                raise click.UsageError(f"{given}: {self.spelling.unavailable[spelling]}", ctx)
        known = [*flags, *self.spelling.aliases, *self.spelling.unavailable]
        closest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f", the closest is {closest[0]}" if closest else ""
        raise click.UsageError(f"no such option: {given}{hint}", ctx)

    def value_name(self, option: str, value: str) -> str:
        """Our name of an option's value."""
        for long, values in self.spelling.values.items():
            if any(long in param.opts and option in param.opts for param in self.params):
                return values.get(value.lower(), value)
        return value

    def options(self, ctx: click.Context) -> list[click.Option]:
        """Every option, `--help` among them."""
        return [param for param in self.get_params(ctx) if isinstance(param, click.Option)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help, section by section."""
        shown = {option for group in self.sections.values() for option in group}
        extra = tuple(option for option in self.options(ctx) if option not in shown)
        for title, group in {**self.sections, "Output": (*self.sections["Output"], *extra)}.items():
            records = [record for option in group if (record := option.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)


class LazyGroup(click.Group):
    """Commands that are imported when they are named.

    Args:
        modules: the module of each command, which holds it as `command`.
        related: what users of other tools type, by the command of ours that comes closest.
    """

    def __init__(
        self,
        name: str,
        *,
        help: str,
        params: Sequence[click.Parameter],
        modules: Mapping[str, str],
        related: Mapping[str, str],
    ) -> None:
        super().__init__(name, help=help, params=list(params), context_settings=HELP)
        self.modules = modules
        self.related = related

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names in the order of a user's work."""
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command.

        Raises:
            click.UsageError: there is no such command.
        """
        if cmd_name in self.modules:
            import importlib

            loaded = importlib.import_module(self.modules[cmd_name]).command
            assert isinstance(loaded, click.Command)
            return loaded
        if cmd_name.startswith("-"):
            return None
        near = difflib.get_close_matches(cmd_name, [*self.modules, *self.related], n=1)
        closest = self.related.get(near[0], near[0]) if near else None
        hint = f"the closest is {closest!r}; " if closest else ""
        raise click.UsageError(f"no such command: {cmd_name}; {hint}commands are {', '.join(self.modules)}", ctx)

    def invoke(self, ctx: click.Context) -> Any:
        """Keep the options given before the command for the command itself."""
        ctx.obj = {name: ctx.params[name] for name in ("verbose", "quiet", "debug")}
        return super().invoke(ctx)
