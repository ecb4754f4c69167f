"""Who may import whom. Everything here reads source, except the fresh processes at the end."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The import law of dpflash/, bottom up. A package, or a file directly in dpflash/, imports from
# the rows before its own; what stands in one row does not import each other.
LAW = [
    ["_lazy", "refusal"],
    ["_json", "_validate", "random_state", "distributed core"],
    ["losses", "noise", "opacus_calls", "optim", "packing"],
    ["patterns", "privacy", "verification"],
    ["isolation"],
    ["attn", "checkpoint", "sampling"],
    ["distributed", "step"],
    ["clipping", "optimizer"],
    ["config", "grad_rules", "recommender"],
    ["nn", "optimize"],
    ["audit", "check", "run"],
    ["build"],
    ["engine"],
    ["integrations", "train"],
    ["release"],
    ["__init__"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
ROW = {unit: row for row, units in enumerate(LAW) for unit in units}
# The private step needs this part of distributed/; ring attention, the other part, needs more.
DISTRIBUTED_CORE = {"__init__", "collectives", "fsdp", "mesh", "slices"}

# House -> what it may import besides the standard library and itself.
MAY_IMPORT = {
    "kernels": {"torch", "triton", "cryptography", "filelock", "mpmath"},
    "accounting": {"numpy", "scipy"},
}
ACCOUNTING_MAY_IMPORT_INSIDE_A_FUNCTION = {"opacus", "dp_accounting"}
DPFLASH_MAY_IMPORT_AT_THE_TOP = {
    *("torch", "numpy", "scipy", "cryptography", "safetensors", "tqdm", "dpflash")
}

# Files that subclass what another library has; `import dpflash` does not load them.
MAY_IMPORT_ITS_LIBRARY = {
    ("dpflash/integrations/lightning.py", "lightning"),
    ("dpflash/integrations/trainer.py", "transformers"),
    ("dpflash/integrations/trl.py", "transformers"),
    ("dpflash/integrations/trl.py", "trl"),
}

FOLDERS = {
    "dpflash": [],
    "kernels": ["kernels"],
    "accounting": ["accounting"],
    "benchmarks": ["bench"],
}
NOT_IN_KERNELS = ("epsilon", "noise_multiplier", "max_grad_norm", "accountant")
NEVER_AT_THE_TOP = ("triton", "matplotlib", "mpmath", "opacus", "peft", "transformers")


def _python_files(folder):
    links = ROOT / "tests" / "typing"
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if links not in p.parents]


def _name(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _nodes(path):
    return list(ast.walk(_tree(path)))


def _running(node, *, on_import):
    """What runs, perhaps only when the file is imported; not what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if on_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child, on_import=on_import)


def _imports(path, nodes):
    """Every import of a file as (absolute module, name taken from it)."""
    first, *rest = path.relative_to(ROOT).parent.parts
    package = ["dpflash", *FOLDERS.get(first, [first]), *rest]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, module] if module else base)
            for alias in node.names:
                yield module, alias.name


def _strangers(path, folder, allowed, nodes):
    """What a file of a sealed package imports and may not."""
    inside = f"dpflash.{folder}"
    return {
        module
        for module, _ in _imports(path, nodes)
        if module.split(".")[0] not in allowed | sys.stdlib_module_names
        and module != inside
        and not module.startswith(inside + ".")
    }


def test_kernels_and_accounting_import_only_their_libraries_and_themselves():
    wrong = {}
    for folder, allowed in MAY_IMPORT.items():
        within = allowed | (
            ACCOUNTING_MAY_IMPORT_INSIDE_A_FUNCTION if folder == "accounting" else set()
        )
        for path in _python_files(folder):
            found = _strangers(path, folder, within, _nodes(path))
            found |= _strangers(path, folder, allowed, _running(_tree(path), on_import=True))
            if found:
                wrong[_name(path)] = found
    assert not wrong


def test_kernels_do_not_speak_of_privacy_parameters():
    files = [*_python_files("kernels"), *(ROOT / "kernels").glob("*.cpp")]
    files += (ROOT / "kernels").glob("*.h")
    texts = {_name(p): p.read_text(encoding="utf-8").lower() for p in files}
    assert not [(n, w) for n, text in texts.items() for w in NOT_IN_KERNELS if w in text]


def _unit(module):
    """The package, or the file directly in dpflash/, that a module belongs to."""
    if not module:
        return "__init__"
    if module[0] == "distributed" and (*module, "__init__")[1] in DISTRIBUTED_CORE:
        return "distributed core"
    return module[0]


def _is_module(module):
    path = ROOT.joinpath("dpflash", *module)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_packages_of_dpflash_import_only_from_the_rows_before_their_own():
    wrong = []
    for path in _python_files("dpflash"):
        own = path.relative_to(ROOT / "dpflash").with_suffix("").parts
        unit = _unit(own[:-1] if own[-1] == "__init__" else own)
        assert unit in ROW, f"{_name(path)}: give {unit!r} a row in LAW"
        for module, name in _imports(path, _running(_tree(path), on_import=False)):
            first, *target = module.split(".")
            if name is not None and _is_module((*target, name)):
                target.append(name)
            if first != "dpflash" or target[:1] in (["kernels"], ["accounting"]):
                continue
            needed = _unit(tuple(target))
            if needed != unit and ROW[needed] >= ROW[unit]:
                wrong.append(f"{_name(path)} imports {'.'.join(target)}")
    assert not wrong


def test_at_most_fifteen_files_stand_directly_in_dpflash():
    assert len(list((ROOT / "dpflash").glob("*.py"))) <= 15


def _declared_attributes():
    """File -> attributes that its classes declare, or set on themselves."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in _python_files(folder):
            own = found.setdefault(_name(path), set())
            for node in _nodes(path):
                for target in _assigned(node):
                    if isinstance(target.value, ast.Name) and target.value.id == "self":
                        own.add(target.attr)
                if isinstance(node, ast.ClassDef):  # the fields of a dataclass
                    fields = [x.target for x in node.body if isinstance(x, ast.AnnAssign)]
                    own |= {field.id for field in fields if isinstance(field, ast.Name)}
    return found


def _assigned(node):
    """The attributes that a statement assigns to."""
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    flat = [t for x in targets for t in (x.elts if isinstance(x, ast.Tuple) else [x])]
    return [t for t in flat if isinstance(t, ast.Attribute)]


# What PyTorch has others assign to (a tied weight, a mode, an optimizer's state too), what Opacus'
# accountants let callers set, and what marks modules that attend across ranks.
ASSIGNED_BY_CUSTOM = {"grad", "requires_grad", "__class__", "data", "weight", "state"}
ASSIGNED_BY_CUSTOM |= {"history", "context_parallel", "training"}
# Objects of the function itself: a copy of an accountant that it spends, the record of a job that
# it writes, a number of numpy's, a structure that C++ reads.
OWN_OBJECTS = {"self", "ctx", "trial", "state", "value", "library", "problem"}


def test_no_file_of_dpflash_sets_attributes_of_another_files_objects():
    declared = _declared_attributes()
    anywhere = set().union(*declared.values()) - ASSIGNED_BY_CUSTOM
    wrong = []
    for folder in ("dpflash", "kernels", "accounting"):
        for path in _python_files(folder):
            elsewhere = anywhere - declared[_name(path)]
            for target in (target for node in _nodes(path) for target in _assigned(node)):
                if target.attr in elsewhere - {"_dpflash"}:
                    owner = ast.unparse(target.value)
                    if owner not in OWN_OBJECTS:
                        wrong.append(f"{_name(path)}:{target.lineno} {owner}.{target.attr}")
    assert not wrong


def test_dpflash_needs_only_its_dependencies_when_imported():
    allowed = DPFLASH_MAY_IMPORT_AT_THE_TOP | sys.stdlib_module_names
    needed = {
        (_name(path), module)
        for path in _python_files("dpflash")
        for module, _ in _imports(path, _running(_tree(path), on_import=True))
    }
    others = {(path, m.split(".")[0]) for path, m in needed} - MAY_IMPORT_ITS_LIBRARY
    assert not {(path, m) for path, m in others if m not in allowed}


def test_nobody_imports_a_package_by_its_folder_name():
    statement = re.compile(r"^\s*(?:from|import) (kernels|accounting|benchmarks)\b", re.MULTILINE)
    files = [path for folder in (*FOLDERS, "tests") for path in _python_files(folder)]
    assert not [_name(p) for p in files if statement.search(p.read_text(encoding="utf-8"))]


def test_no_init_file_makes_tests_a_package():
    assert not [_name(p) for p in _python_files("tests") if p.name == "__init__.py"]


def _in_a_fresh_process(code, cwd):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_models_are_built_without_accounting_and_dpflash_loads_no_optional_library(tmp_path):
    code = (
        "import sys, torch; before = set(sys.modules); import dpflash.nn\n"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before if 'scipy' in m},\n"
        "      *(m for m in sys.modules if m.startswith('dpflash.accounting')))\n"
        "import dpflash, dpflash.cli; [getattr(dpflash, name) for name in dpflash.__all__]\n"
        f"print(*(m for m in {NEVER_AT_THE_TOP!r} if m in set(sys.modules) - before))"
    )
    assert _in_a_fresh_process(code, tmp_path) == ""


def test_dpflash_imports_where_no_optional_library_is_installed(tmp_path):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NEVER_AT_THE_TOP!r}))\n"
        "import dpflash, dpflash.kernels, dpflash.accounting, dpflash.nn\n"
        "[getattr(dpflash, name) for name in dpflash.__all__]; print('imported')"
    )
    assert _in_a_fresh_process(code, tmp_path) == "imported"


def test_no_module_takes_the_place_of_a_public_name():
    """Importing a submodule makes it an attribute of the package."""
    import dpflash

    modules = {path.stem for path in (ROOT / "dpflash").glob("[!_]*")} | {"kernels", "accounting"}
    modules_of_users = {"accounting", "distributed", "losses", "nn", "noise", "patterns"}
    modules_of_users |= {"optim", "sampling"}
    assert modules & set(dpflash.__all__) == modules_of_users


def test_accounting_commands_start_without_torch_and_slow_parts_of_scipy(tmp_path):
    run = "'--sample-rate', '0.01', '--steps', '9', '--delta', '1e-5'"
    code = (
        "import contextlib, io, sys\n"
        "from dpflash.accounting import PoissonGaussian\n"
        "from dpflash.cli import main\n"
        "from dpflash.privacy.ledger import Ledger\n"
        "step = PoissonGaussian(noise_multiplier=1.0, sample_rate=0.01)\n"
        "Ledger('ledger').append(run='first', event=step, accountant='contour')\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main(['epsilon', '--noise-multiplier', '1', {run}])\n"
        f"    main(['calibrate', '--target-epsilon', '3', {run}])\n"
        "    main(['budget', 'ledger', '--delta', '1e-5'])\n"
        "    with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print(*(m for m in ('torch', 'scipy.stats', 'scipy.optimize') if m in sys.modules))"
    )
    assert _in_a_fresh_process(code, tmp_path) == ""


# Refusals: an error or a warning whose class is not private must not depend on private data.
PRIVATE = {"PrivateRefusal", "PrivateWarning", "BackwardsDiffer", "PrivateRankError"}
# What runs between the draws. Its messages name layers, arguments, shapes and types.
IN_TRAINING = {"clipping", "grad_rules", "losses", "optimizer", "packing", "sampling", "step"}
IN_TRAINING |= {"isolation", "verification"}
OF_TRANSFORMERS = Path("integrations", "transformers.py")
# Functions that read values or count, so what is assigned from them may be of the data.
READING = {"all", "any", "argmax", "argmin", "bool", "count", "float", "int", "item", "len", "max"}
READING |= {"min", "nonzero", "numel", "pop", "popleft", "size", "sum", "tolist"}
# Read by a person: arguments, names of layers and parameters, shapes, what a template was given.
REVIEWED = {
    *("', '.join(wrong)", "(most - 4096) // 2", "Pairs.ROWS * size", "_torch_kind(module)"),
    *("computed + others", "dict(bounds)", "different[0]", "len(foreign)", "len(groups)"),
    *("len(values)", "max(1, rows // 4)", "most", "refusal"),
    *("self._name", "shared", "described(self)"),
    *(
        "__name__",
        "_dropout_names(module, dropout)",
        "_REMEDIES[name]",
        "unknown[0]",
        "targets[0]",
    ),
    *("described(module)", "tokens // rows", "tokens // rows * rows or rows", "weight.shape[0]"),
}


def _called(node):
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}


def _names(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _of_values(function):
    """Names of a function that are assigned from what reads values, also by way of others."""
    found: set[str] = set()
    while True:
        before = len(found)
        for node in ast.walk(function):
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            value = getattr(node, "iter", getattr(node, "value", None))
            if value is not None and targets[0] is not None:
                if _called(value) & READING or _names(value) & found:
                    found |= set().union(*map(_names, targets))
        if len(found) == before:
            return found


def _helpers(tree):
    """Functions of a module that only raise, with the class."""
    return {
        function.name: ast.unparse(node.exc.func)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.returns is not None
        if ast.unparse(function.returns) == "NoReturn"
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }


def _messages(function, helpers):
    """(statement, its class, what its text shows) for each raise and warning."""
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, kind = node.exc, ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in helpers:
            call, kind = node, helpers[node.func.id]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warn", "warnings.warn"):
            call, kind = node, ast.unparse(node.args[1]) if len(node.args) > 1 else "UserWarning"
        else:
            continue
        texts = call.args if isinstance(node, ast.Call) else call.args[:1]
        shown = [n for text in texts for n in ast.walk(text)]
        values = [n.value for n in shown if isinstance(n, ast.FormattedValue)]
        yield node, kind, list(map(ast.unparse, values))


def _is_public(shown, of_values):
    if shown in REVIEWED or shown.endswith((".__name__", ".dtype", ".device", ".shape)")):
        return True
    *_, last = parts = shown.split(".")
    is_name = all(map(str.isidentifier, parts)) and (last[0] != "_" or last.isupper())
    return is_name and shown not in {*of_values, "error"}


def _messages_of_data(path, tree):
    """Messages that may show something of the private data, and private ones with a cause."""
    inside = path.relative_to(ROOT / "dpflash")
    in_training = inside.parts[0].removesuffix(".py") in IN_TRAINING or inside == OF_TRANSFORMERS
    helpers = _helpers(tree)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        messages = list(_messages(function, helpers))
        of_values = _of_values(function) if messages else set()
        for node, kind, shown in messages:
            where = f"{_name(path)}:{node.lineno} {kind}"
            if kind in PRIVATE and isinstance(node, ast.Raise):
                if not (isinstance(node.cause, ast.Constant) and node.cause.value is None):
                    yield f"{where} without `from None`"
            if kind in PRIVATE or in_training:
                bad = [x for x in shown if not _is_public(x, of_values)]
                bad += [x for x in shown if kind in PRIVATE and "shape" in x]
                yield from (f"{where} shows {x}" for x in bad)


def _lines_of_code(path):
    """Lines that are not empty, a comment or a part of a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    lines = path.read_text().splitlines()
    for node in ast.walk(_tree(path)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * (
                first.end_lineno - first.lineno + 1
            )
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def test_the_files_to_audit_are_few_lines():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    section = page.partition("## What to audit\n")[2].partition("\n## ")[0]
    claimed = int(re.search(r"([\d,]+) lines of code", section)[1].replace(",", ""))
    files, folder = set(), ""
    for name in re.findall(r"`([\w/]+\.py)`", section):
        folder = name.rpartition("/")[0] or folder
        files.add(ROOT / folder / name.rpartition("/")[2])
    found = sum(map(_lines_of_code, files))
    assert len(files) == 21 and found < 3300
    assert abs(found - claimed) < 100, found


def test_every_warning_names_the_line_of_the_user():
    files = [path for path in _python_files("dpflash") if "warnings.warn(" in path.read_text()]
    assert files == [ROOT / "dpflash" / "refusal.py"]


def test_no_message_shows_private_data():
    files = _python_files("dpflash")
    assert not [line for path in files for line in _messages_of_data(path, _tree(path))]


def test_messages_that_show_private_data_are_found():
    path = ROOT / "dpflash" / "losses.py"
    for statement in (
        "raise ValueError(f'targets reach {int(x.max())}')",
        "raise ValueError(f'targets reach {x.max().item()}')",
        "largest = x.max()\n  raise ValueError(f'targets reach {largest}')",
        "for n, row in enumerate(x.tolist()): raise ValueError(f'row {n}')",
        "raise ValueError(f'{x.shape[0]} rows')",
        "raise ValueError(f'a draw has {self._seen} samples')",
        "raise ValueError(f'torch says {error}')",
        "warn(f'{len(x)} samples are bad')",
        "_refuse_data(f'of shape {tuple(x.shape)}', 'expected another')",
        "_refuse('lengths', f'expected {x.tolist()}')",
        "raise PrivateRefusal('the lengths differ')",
        "raise PrivateRefusal(f'the lengths differ in {tuple(x.shape)}') from None",
    ):
        raising = "def _refuse(x, y) -> NoReturn:\n  raise ValueError(f'{x}{y}')\n"
        raising += "def _refuse_data(x, y) -> NoReturn:\n  raise PrivateRefusal(x) from None\n"
        tree = ast.parse(f"{raising}def check(self, x, error):\n  {statement}")
        assert list(_messages_of_data(path, tree)), statement


def test_troubleshooting_lists_every_error_and_warning():
    """Where this fails, run `python docs/messages.py`."""
    spec = importlib.util.spec_from_file_location("messages", ROOT / "docs" / "messages.py")
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    files = [path for folder in messages.FOLDERS for path in _python_files(folder)]
    found = messages.written({_name(path): _nodes(path) for path in files})
    page = messages.PAGE.read_text().partition(messages.BEGIN)[2]
    assert "**private, do not publish**" in page and "**not tested with dpflash" in page
    assert not re.search(r"^- \*\*[^a-z]*\*\*", page, re.MULTILINE)
    assert not set(found.splitlines()) ^ set(page.splitlines())
    # Of a table, of an attribute, and of a variable.
    for words in ("is never wrapped", "padded less, so nothing was released", "allows no step"):
        assert words in found
