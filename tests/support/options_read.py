"""The options that a command's code reads, found in its syntax: from a function to all that it names, and so on."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dino_sparo

ROOT = Path(dino_sparo.__file__).parent.parent
Definition = tuple[str, str]  # a module, and a name at its top


def options_read(*definitions: Definition, texts: bool = True) -> set[str]:
    """All X of `args.X` and `self.args.X` in these functions and in what they name.

    A method counts once some code that was found so far has an attribute of its name.

    Args:
        definitions: where to begin.
        texts: also all texts of a function with `getattr(args, ...)` or `vars(args)`, where options may be named so.
    """
    known, waiting, read = set[Definition](), list(definitions), set[str]()
    used, methods = set[str](), list[tuple[str, ast.FunctionDef]]()  # names of attributes; methods not used so far
    while waiting:
        module, name = waiting.pop()
        if (module, name) in known:
            continue
        known.add((module, name))
        node = definitions_of(module).get(name)
        if node is None:  # a name that a package passes on, or another package's
            waiting += [names_of(module)[name]] if name in names_of(module) else []
            continue
        own_methods = [part for part in getattr(node, "body", []) if isinstance(part, ast.FunctionDef)]
        methods += [(module, method) for method in own_methods if isinstance(node, ast.ClassDef)]
        parts = [(module, part) for part in parts_of(node)]
        while parts:
            for place, part in parts:
                own_read, own_used, named = found_in(place, part, texts)
                read |= own_read
                used |= own_used
                waiting += named
            parts = [(place, method) for place, method in methods if method.name in used]
            methods = [(place, method) for place, method in methods if method.name not in used]
    return read


@cache
def found_in(module: str, node: ast.AST, texts: bool) -> tuple[set[str], set[str], list[Definition]]:
    """Options that a piece of syntax reads itself, the attributes in it, and the definitions that it names."""
    attributes = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return set(attributes_of_args(node, texts)), attributes, list(references(module, node))


def parts_of(node: ast.AST) -> list[ast.AST]:
    """A definition; of a class all but the methods that are called by name."""
    if not isinstance(node, ast.ClassDef):
        return [node]
    called = (part for part in node.body if not isinstance(part, ast.FunctionDef) or part.name.startswith("__"))
    return [*node.bases, *node.decorator_list, *called]


@cache
def tree_of(module: str) -> ast.Module:
    """A module's syntax; empty if it is another package's."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.parse("")


@cache
def definitions_of(module: str) -> dict[str, ast.AST]:
    """Functions, classes and constants at the top of a module."""
    found: dict[str, ast.AST] = {}
    for node in tree_of(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def names_of(module: str) -> dict[str, Definition]:
    """Names that a module imports, anywhere in it -> what they mean."""
    return names_in(tree_of(module))


def names_in(tree: ast.AST) -> dict[str, Definition]:
    """Names that are imported within a piece of syntax -> what they mean."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def references(module: str, node: ast.AST) -> Iterator[Definition]:
    """What a definition names: by `name` or by `module.name`; what it imports itself comes first."""
    names = names_of(module) | names_in(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield names.get(part.id, (module, part.id))
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in names:
            yield ".".join(names[part.value.id]), part.attr


def attributes_of_args(node: ast.AST, texts: bool) -> Iterator[str]:
    """The options that a definition reads itself; see `options_read`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and is_args(part.value):
            yield part.attr
        elif texts and isinstance(part, ast.Call) and is_args_by_name(part):
            texts_in = (text.value for text in ast.walk(node) if isinstance(text, ast.Constant))
            yield from (text for text in texts_in if isinstance(text, str))


def is_args_by_name(call: ast.Call) -> bool:
    """Whether a call is `vars(args)` or `getattr(args, ...)`."""
    return getattr(call.func, "id", "") in ("getattr", "vars") and bool(call.args) and is_args(call.args[0])


def is_args(node: ast.AST) -> bool:
    """Whether an expression is called `args`."""
    return getattr(node, "id" if isinstance(node, ast.Name) else "attr", "") == "args"
