"""Writes the list of dpflash's errors and warnings in docs/troubleshooting.md, from its sources.

python docs/messages.py

The list has the first words, cause and remedy of each message. Messages are found in `raise`, in
`warn(...)`, in functions that return a refusal, and in the command line. Texts in tables and
variables are listed too if they read like messages. "…" stands for a part that differs between
cases. Errors that dpflash catches itself, or that have no text of their own, are left out.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN = "<!-- docs/messages.py writes what follows -->\n"
FOLDERS = ("dpflash", "kernels", "accounting")
# What the user was doing -> prefixes of the sources that raise then; the longest prefix counts.
DOING = {
    "Calling make_private": "_lazy _validate build config engine opacus_calls optim refusal",
    "The model and its layers": "check clipping grad_rules isolation nn verification",
    "Batches, losses and steps": "losses packing run sampling step",
    "Faster steps": "optimize/",
    "Epsilon, budgets and ledgers": "accounting noise privacy",
    "Checkpoints and released models": "checkpoint release",
    "The command line": "cli train",
    "Trainers and frameworks": "integrations",
    "Several ranks": "distributed",
    "Attention and its patterns": "attn patterns recommender kernels/attention kernels/tile",
    "Audits": "audit",
    "Kernels, devices and compilers": "kernels",
}
# Sources whose other texts are reports, tables or help texts.
REPORTS = ("audit", "cli", "kernels", "noise", "optimize", "patterns", "recommender")
REPORTS += ("privacy/card", "privacy/public_facts", "train/report")
# Functions that print errors or add notes to a report -> the sources whose calls are listed.
NOTES = dict.fromkeys(("print", "error"), ("dpflash/cli/",))
NOTES["append"] = ("dpflash/cli/doctor", "dpflash/train/report")
INTERNAL = {"AttributeError", "AssertionError", "Interrupted", "KeyError", "NotCaptured"}
GAP = "…"
# Matches where a cause, a remedy or a second sentence follows.
_MESSAGE = re.compile(r"[\w)'\]]: [a-z]|; [a-z]|[a-z)]\. [A-Z]")
_PROGRAM = re.compile(r"^dpflash: (error: |warning: )?")
T = TypeVar("T")
Nodes = Mapping[str, Sequence[ast.AST]]


class Sources:
    """The messages in the sources.

    Args:
        nodes: all nodes of each file, by its path below the repository's root.
    """

    def __init__(self, nodes: Nodes) -> None:
        kinds = (ast.Assign, ast.Call, ast.Expr, ast.FunctionDef, ast.Raise)
        self.nodes = {p: [n for n in found if isinstance(n, kinds)] for p, found in nodes.items()}
        self.literals = {p: list(_literals(n)) for p, n in nodes.items() if not _is_report(p)}
        self.functions: dict[str, dict[str, ast.FunctionDef]] = defaultdict(dict)  # name, file
        self.constants: dict[str, dict[str, ast.expr]] = defaultdict(dict)
        made = set()
        for path, node in ((path, node) for path, some in self.nodes.items() for node in some):
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name][path] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                own = self.constants[node.targets[0].id]
                own[path] = ast.Constant(GAP) if path in own else node.value
            elif _raises(node):
                made.add(_name(node.exc))
        never = {n for n, f in self.functions.items() if "NoReturn" in map(_returns, f.values())}
        self.helpers = (made & self.functions.keys()) | never

    def texts(
        self, node: ast.expr | None, path: str, given: Mapping[str, str] = MappingProxyType({})
    ) -> list[str]:
        """Return all texts that an expression may have; `given` maps parameters to texts."""
        again = partial(self.texts, path=path, given=given)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr | ast.BinOp):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
            found = [again(x.value if isinstance(x, ast.FormattedValue) else x) for x in parts]
            return ["".join(one[0] if len(one) == 1 else GAP for one in found)]
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return [text for part in parts for text in again(part)]
        if isinstance(node, ast.Name) and node.id in given:
            return [given[node.id]]
        known = self.constants[node.id] if isinstance(node, ast.Name) else {}
        if path in known or (known and node.id.isupper()):
            value = _nearest(known, path)
            return self.texts(value, path, {**given, node.id: GAP})
        if isinstance(node, ast.Call) and _name(node) == "format":
            assert isinstance(node.func, ast.Attribute)
            return [re.sub(r"{[^}]*}", GAP, text) for text in again(node.func.value)]
        return [GAP]

    def said_by(self, call: ast.Call, path: str) -> Iterator[str]:
        """Yield the messages of a call that makes an error, or of the helper that it calls."""
        if _name(call) not in self.helpers:
            yield from self.texts(call.args[0] if call.args else None, path)
            return
        function = _nearest(self.functions[_name(call)], path)
        names = [a.arg for a in function.args.args if a.arg != "self"]
        values = dict(zip(names, call.args, strict=False))
        values |= {str(k.arg): k.value for k in call.keywords}
        given = {name: self.texts(value, path)[0] for name, value in values.items()}
        for node in ast.walk(function):
            error = getattr(node, "exc", getattr(node, "value", None))
            if isinstance(node, ast.Raise | ast.Return) and isinstance(error, ast.Call):
                yield from self.texts(error.args[0], path, given) if error.args else ()

    def messages(self) -> Iterator[tuple[str, str]]:
        """Yield (file, message) for each message; a message may repeat."""
        helpers = [f for name in self.helpers for f in self.functions[name].values()]
        inside = {id(node) for function in helpers for node in ast.walk(function)}
        for path, nodes in self.nodes.items():
            for node in (node for node in nodes if id(node) not in inside):
                found: Iterator[str] | list[str] = []
                called = node.value if isinstance(node, ast.Expr) else None
                if _raises(node) and _name(node.exc) not in INTERNAL:
                    found = self.said_by(node.exc, path)
                elif isinstance(node, ast.Call) and _name(node) == "warn":
                    found = self.texts(node.args[0], path)
                elif isinstance(node, ast.Call) and _is_note(node, path):
                    found = self.texts(node.args[0], path)
                elif isinstance(called, ast.Call) and _name(called) in self.helpers:
                    found = self.said_by(called, path)
                elif isinstance(node, ast.FunctionDef) and _returns(node) == "str | None":
                    values = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
                    found = [t for v in values for t in self.texts(v, path) if parts_of(t)[2]]
                yield from ((path, text) for text in found)

    def further(self, listed: str) -> Iterator[tuple[str, str]]:
        """Yield (file, text) of each text that reads like a message and is not in `listed`."""
        for path, literals in self.literals.items():
            for text in (text for node in literals for text in self.texts(node, path)):
                text = " ".join(re.sub("%s|{[^}]*}", GAP, text).split()).lstrip(";., ")
                pieces = [piece.strip() for piece in text.split(GAP) if piece.count(" ") > 2]
                if _MESSAGE.search(text) and not all(piece in listed for piece in pieces):
                    yield path, text


def _literals(nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """Yield the whole texts of a file, without docstrings."""
    inside = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:  # outer nodes come first
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in inside:
            parts = list(ast.walk(node))
            inside |= set(map(id, parts))
            if any(isinstance(getattr(part, "value", None), str) for part in parts):
                yield node


def _is_report(path: str) -> bool:
    return path.removeprefix("dpflash/").startswith(REPORTS)


def _nearest(found: Mapping[str, T], path: str) -> T:
    """Return the definition of a name in the file `path`, else in any other file."""
    return found[path] if path in found else next(iter(found.values()))


def _raises(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)


def _is_note(call: ast.Call, path: str) -> bool:
    is_shown = _name(call) != "print" or any(keyword.arg == "file" for keyword in call.keywords)
    return is_shown and path.startswith(NOTES.get(_name(call), ())) and bool(call.args)


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _returns(function: ast.FunctionDef) -> str:
    return "" if function.returns is None else ast.unparse(function.returns)


def parts_of(message: str) -> tuple[str, str, str]:
    """Split "what: why; remedy" or "what: remedy" into first words, cause and remedy.

    Users search for the first words. If "what" is only a value, the next part joins them.
    """
    text = re.sub(f"{GAP}+", GAP, " ".join(message.split()))
    found = re.fullmatch(r"(.*?)(?:: (.*?))?(?:(?:; |\. )(.*))?", text)
    assert found is not None
    what, why, remedy = (part or "" for part in found.groups())
    if why and not remedy and not why.startswith("expected"):
        why, remedy = "", why
    while not re.search("[a-z]", what) and (why or remedy):
        first, _, rest = (why or remedy).partition(": ")
        what = first if what == GAP else f"{what}: {first}"
        why, remedy = (rest, remedy) if why else ("", rest)
    return what, why, remedy if re.search("[a-z]", remedy) else ""


# Matches text to set as code: calls, names with values, shapes, names, and Markdown's symbols.
_CODE = re.compile(
    r"[\w.…=]*\w\((?!s\))(?:[^()`]|\((?:[^()`]|\([^()`]*\))*\))*\)"
    r"|[\w.…]*[\w…]=(?:\([^()`]*\)|\[[^\]`]*\]|[^\s`,;:)]*)|[\w.]*\[[^\]`]*\]"
    r"|[\w.]*_[\w.*]*\w|\w+\.[a-z_][\w.]*\w|\*+\w+|<\w[^\s`]*|\\+\w*"
)


def _written(text: str) -> str:
    """Return the text as Markdown."""
    halves = text.split("`")
    halves[::2] = [_CODE.sub(lambda found: f"`{found[0]}`", half) for half in halves[::2]]
    return "`".join(halves).replace("``", "")


def _place(entry: tuple[str, str, str]) -> tuple[bool, str, str, str]:
    """Return a sort key that puts entries last if their first words differ between cases."""
    own = re.sub(r"^[^\w.]+", "", entry[0])
    return not own, own, *entry[1:]


def written(nodes: Nodes) -> str:
    """Return the list, under headings."""
    prefixes = {prefix: name for name, all_of in DOING.items() for prefix in all_of.split()}
    prefixes[""] = "Elsewhere"
    found: dict[str, set[tuple[str, str, str]]] = {name: set() for name in prefixes.values()}
    sources = Sources(nodes)
    messages = list(sources.messages())
    listed = "\n".join(" ".join(message.split()) for _, message in messages)
    for path, message in [*messages, *sources.further(listed)]:
        message = _PROGRAM.sub("", message)
        if len(re.findall("[a-z]", message)) > 13:
            inside = path.removeprefix("dpflash/")
            of = max((prefix for prefix in prefixes if inside.startswith(prefix)), key=len)
            found[prefixes[of]].add(parts_of(message))
    lines = []
    for name, entries in ((name, entries) for name, entries in found.items() if entries):
        lines += [f"\n## {name}\n"]
        for what, why, remedy in sorted(entries, key=_place):
            line = f"- **{_written(what)}**" + f": {_written(why)}" * bool(why)
            lines.append(line + f" → {_written(remedy)}" * bool(remedy))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the part of the page below its marker."""
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    trees = {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text()) for p in sorted(files)}
    text = written({path: list(ast.walk(tree)) for path, tree in trees.items()})
    PAGE.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + text)


if __name__ == "__main__":
    main()
