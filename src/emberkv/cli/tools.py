"""`emberkv bench` and `emberkv demo`: hand over to rooms that are large and slow to import.

A tool is a module with `run_cli(json: bool, **options) -> int` (the exit code). Its keyword parameters are the options
of the command (int, float, str, bool, Path; `| None` allowed), so an option is stated once, where it is used:
`emberkv bench wire --rounds 3` calls `emberkv.bench.wire.run_cli(json=False, rounds=3)`. A line of the tool's
docstring that begins with the option's name and a colon is its help.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from emberkv.cli.output import results
from emberkv.errors import ConfigError

DEMO_MODULE = "emberkv.demo.run"
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_KINDS: tuple[type, ...] = (bool, int, float, str, Path)


def bench_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which benchmark; `emberkv bench` lists them.")] = "",
) -> None:
    """Measure the data plane against its references."""
    known = bench_names()
    if name in ("", "--help", "-h"):
        results().print("Usage: emberkv bench NAME [options]; see `emberkv bench NAME --help`.", markup=False)
        results().print(f"benchmarks: {', '.join(known) or 'none is installed'}")
        return
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
        raise ConfigError(f"no benchmark is called {name!r}; {hint}")
    _dispatch(f"emberkv bench {name}", f"emberkv.bench.{name}", context.args)


def demo_command(context: typer.Context) -> None:
    """Continue a real model's conversations on another engine after a node was killed."""
    _dispatch("emberkv demo", DEMO_MODULE, context.args)


def bench_names() -> list[str]:
    """Modules of emberkv.bench that say `run_cli`, without importing them."""
    spec = importlib.util.find_spec("emberkv.bench")
    names = []
    for info in pkgutil.iter_modules(spec.submodule_search_locations if spec else []):
        file = importlib.util.find_spec(f"emberkv.bench.{info.name}")
        source = Path(file.origin).read_text() if file and file.origin else ""
        if re.search(r"^def run_cli\(", source, re.MULTILINE):
            names.append(info.name)
    return sorted(names)


def _dispatch(command: str, module_name: str, arguments: list[str]) -> None:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        what = "is not part of this installation" if missing.startswith("emberkv") else f"needs the package {missing!r}"
        raise ConfigError(f"{command} {what} (from a checkout: make demo, make bench)") from None
    run_cli: Callable[..., int] = module.run_cli
    kinds = option_kinds(run_cli)
    if any(argument in ("--help", "-h") for argument in arguments):
        _print_help(command, run_cli, kinds)
        return
    options = parse_options(command, arguments, kinds)
    code = run_cli(json=bool(options.pop("json", False)), **options)
    if code:
        raise typer.Exit(code)


def option_kinds(run_cli: Callable[..., int]) -> dict[str, type]:
    """The type of each option that a `run_cli` takes; `json` among them."""
    hints = typing.get_type_hints(run_cli)
    kinds = {}
    for name in inspect.signature(run_cli).parameters:
        hint = hints.get(name, str)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
        kinds[name] = hint if hint in _KINDS else str
    return kinds


def parse_options(command: str, arguments: list[str], kinds: Mapping[str, type]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--flag` and `--no-flag` as typed values. Raises ConfigError."""
    options: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"unexpected argument {argument!r} (see `{command} --help`)")
        flag, equals, text = argument[2:].partition("=")
        name = flag.replace("-", "_")
        if kinds.get(name) is bool and not equals:
            options[name] = True
            continue
        if kinds.get(name.removeprefix("no_")) is bool and name.startswith("no_") and not equals:
            options[name.removeprefix("no_")] = False
            continue
        kind = kinds.get(name)
        if kind is None or kind is bool:
            close = difflib.get_close_matches(name, kinds, n=1)
            hint = f"; did you mean --{close[0].replace('_', '-')}?" if close and close[0] != name else ""
            raise ConfigError(f"no such option or form: {argument}{hint} (see `{command} --help`)")
        if not equals:
            if not rest:
                raise ConfigError(f"{argument} needs a value (see `{command} --help`)")
            text = rest.pop(0)
        try:
            options[name] = kind(text)
        except ValueError:
            raise ConfigError(f"--{flag}: {text!r} is not a number") from None
    return options


def _print_help(command: str, run_cli: Callable[..., int], kinds: Mapping[str, type]) -> None:
    document = inspect.getdoc(run_cli) or ""
    helps = dict(re.findall(r"^\s*(\w+): (.*)$", document, re.MULTILINE))
    console = results()
    console.print(
        f"Usage: {command} [options]\n\n{document.splitlines()[0] if document else ''}\n", markup=False, soft_wrap=True
    )
    defaults = inspect.signature(run_cli).parameters
    for name, kind in kinds.items():
        flag = f"--{name.replace('_', '-')}" + ("" if kind is bool else f" {kind.__name__.upper()}")
        default = defaults[name].default
        shown = "" if default in (inspect.Parameter.empty, None, False, "") else f" (default {default})"
        text = helps.get(name, "Print one JSON document." if name == "json" else "")
        console.print(f"  {flag:<28} {text}{shown}", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("bench", context_settings=_PASS_ON)(bench_command)
    app.command("demo", context_settings=_PASS_ON)(demo_command)
