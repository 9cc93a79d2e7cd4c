"""Messages of the package, rendered from the source: the arguments of each call of an error class,
with `{expression}` for a value that is known only at run time.

    .venv/bin/python -m tests.support.error_messages   # writes tests/golden/messages.txt
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megatron_vlm.errors import render

PACKAGE = Path(__file__).parents[2] / "megatron_vlm"
GOLDEN = Path(__file__).parents[1] / "golden" / "messages.txt"
BASE = "MegatronVLMError"


@cache
def trees() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in files}


def error_classes(modules: dict[str, ast.Module]) -> set[str]:
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {BASE}
    while more := {name for name, above in bases.items() if above & names} - names:
        names |= more
    return names


def template(node: ast.expr) -> str:
    """Return the text of an expression, with `{expression}` for a computed value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return template(node.value) if isinstance(node.value, ast.Constant) else _braced(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return _braced(node)


def _braced(node: ast.expr) -> str:
    return "{" + ast.unparse(node).replace("\n", " ") + "}"


def calls(
    tree: ast.Module, classes: set[str], is_config: bool = False
) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (function, class of the error, call) for each error, in the order of the file."""

    def walk(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, str, ast.Call]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside += (node.name,)
        if is_config and isinstance(node, ast.Yield) and isinstance(call := node.value, ast.Call):
            value = ast.keyword("found", ast.Name("value"))  # check_of adds the value of the key
            node = ast.copy_location(ast.Call(call.func, call.args, [*call.keywords, value]), call)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            if name in classes:
                yield ".".join(inside) or "module", name, node
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(tree, ())


def message(call: ast.Call) -> str:
    """Return the message of the error, as `render` formats it."""
    fields = {word.arg: template(word.value) for word in call.keywords if word.arg}
    if call.args:
        fields["problem"] = template(call.args[0])
    known = {"problem", "place", "key", "found", "allowed", "remedy"}
    return render(**{name: _Template(text) for name, text in fields.items() if name in known})


class _Template(str):
    """Text whose repr is the text itself, also where a value would be quoted."""

    def __repr__(self) -> str:
        return str(self)


def is_without_fields(call: ast.Call) -> bool:
    """Return whether the call writes a message of its own and names neither key nor place."""
    if any(word.arg in ("place", "key", None) for word in call.keywords):
        return False
    return bool(call.args) and isinstance(call.args[0], ast.Constant | ast.JoinedStr | ast.BinOp)


def all_messages() -> str:
    modules = trees()
    classes = error_classes(modules)
    lines = []
    for name, tree in modules.items():
        errors = calls(tree, classes, is_config=name.startswith("config/"))
        entries = [f"  {where}: {kind}: {message(call)}" for where, kind, call in errors]
        lines += [name, *entries] if entries else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(all_messages())
