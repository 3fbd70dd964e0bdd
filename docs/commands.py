"""The page `commands.md` of the site: every command with all its options, made from the parsers while mkdocs builds."""

import argparse

import mkdocs_gen_files

from dino_sparo.commands import SECTIONS

HEADER = ("| Option | Default | Meaning |", "|---|---|---|")


def cell(text: str) -> str:
    """Text that is safe in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def row(action: argparse.Action) -> str:
    """An option with its default and its help."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    default = "" if action.default in (None, "", False, argparse.SUPPRESS) else f"`{action.default}`"
    text = (action.help or "") % {"default": action.default}
    return f"| {names} | {cell(default)} | {cell(text)} |"


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """A table of options for each group of a parser."""
    lines = []
    for group in parser._action_groups:
        if group.title == "help and configuration":  # explained once, on the page of configuration files
            continue
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            lines += [f"**{group.title}**", "", *HEADER, *map(row, actions), ""]
    return lines


with mkdocs_gen_files.open("commands.md", "w") as page:
    lines = [
        "# Commands",
        "",
        "`dino-sparo COMMAND --help-all` prints the same on the terminal. Every command takes "
        "[configuration files](configuration.md).",
        "",
    ]
    for section, commands in SECTIONS.items():
        lines += [f"## {section[0].upper()}{section[1:]}", ""]
        for name, command in commands.items():
            title = f"{command.instead_of}, by a CLIP or an OC-CLIP" if command.instead_of else name
            lines += [f"### dino-sparo {title}", "", command.summary, ""]
            lines += options_of(command.parser()) if command.parser else []
    page.write("\n".join(lines))
