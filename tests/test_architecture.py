"""Who may import whom. Everything here reads source, except the fresh processes at the end."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Where a file of dpflash/ (or a package in it) stands. It imports from lower floors only; files of
# one package may import each other. A new file is added here, on the lowest floor that holds it.
FLOORS = {
    "_validate": 0,
    "ceilings": 0,
    "precision": 0,
    "rotary": 0,
    "clipping": 1,
    "collating": 1,
    "corpus": 1,
    "kept": 1,
    "lengths": 1,
    "masks": 2,
    "losses": 1,
    "measure": 1,
    "patterns": 1,
    "planner": 1,
    "release": 2,
    "streams": 1,
    "workers": 0,
    "mesh": 1,
    "sharding": 1,
    "tensor_files": 1,
    "digests": 0,
    "random_state": 0,
    "watch": 1,
    "proof": 2,
    "rehearsal": 1,
    "twice": 2,
    "unchanged": 2,
    "context_gate": 4,
    "attention_op": 2,
    "boundary": 2,
    "ledger": 1,
    "ledger_file": 0,
    "relations": 1,
    "tracker": 1,
    "budget": 1,
    "gate": 3,
    "integrations": 2,
    "public_facts": 0,
    "row_order": 2,
    "sampling": 3,
    "slots": 2,
    "measured": 2,
    "recommender": 3,
    "spending": 3,
    "training_config": 2,
    "explain": 4,
    "functional": 3,
    "distributed": 4,
    "grad_rules": 4,
    "report": 3,
    "attach": 5,
    "leveled": 5,
    "optimization": 2,
    "nn": 5,
    "checkpoint": 4,
    "sharded_checkpoint": 5,
    "huggingface": 4,
    "arguments": 6,
    "joining": 6,
    "check": 6,
    "optimizer": 5,
    "engine": 7,
    "launch": 7,
    "team": 6,
    "training": 8,
    "__init__": 9,
    "bench": 10,
    "cli": 11,
    "__main__": 12,
}

# Import name -> where it may come from, besides the standard library and the house itself.
KERNELS_MAY_IMPORT = {"torch", "triton", "cryptography", "mpmath"}
ACCOUNTING_MAY_IMPORT = {"numpy", "scipy"}
ACCOUNTING_MAY_IMPORT_INSIDE_A_FUNCTION = {"opacus", "dp_accounting"}
DPFLASH_MAY_IMPORT_AT_THE_TOP = {"torch", "numpy", "scipy", "cryptography", "tqdm", "dpflash"}

NOT_IN_KERNELS = ("epsilon", "noise_multiplier", "max_grad_norm", "accountant")
NEVER_AT_THE_TOP = ("triton", "matplotlib", "mpmath", "opacus", "transformers")


def _python_files(house: str) -> list[Path]:
    hidden_or_link = ROOT / "tests" / "typing"
    return [p for p in sorted((ROOT / house).rglob("*.py")) if hidden_or_link not in p.parents]


CPP_FILES = [p for p in sorted((ROOT / "kernels").iterdir()) if p.suffix in (".cpp", ".h")]


def _ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _package_of(path: Path) -> list[str]:
    """The package from which a file's relative imports start; kernels/ is dpflash.kernels."""
    first, *rest = path.relative_to(ROOT).parent.parts
    inside = {"dpflash": [], "benchmarks": ["bench"]}.get(first, [first])
    return ["dpflash", *inside, *rest]


def _imports(path: Path, tree: ast.AST | None = None) -> Iterator[tuple[str, str | None]]:
    """Every import of a file as (absolute module, name taken from it)."""
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = _package_of(path)
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, module] if module else base)
            for alias in node.names:
                yield module, alias.name


def _import_time_tree(path: Path) -> ast.Module:
    """The file without its function bodies: what runs when it is imported."""

    class DropFunctionBodies(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    return DropFunctionBodies().visit(ast.parse(path.read_text(encoding="utf-8")))


def _strangers(path: Path, house: str, allowed: set[str], tree: ast.AST | None = None) -> set[str]:
    """What a file of a sealed house imports and may not."""
    found = set()
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        found |= {m for m in modules if m.split(".")[0] not in allowed | sys.stdlib_module_names}
    inside = f"dpflash.{house}"
    for module, _ in _imports(path):
        if module.startswith("dpflash") and module != inside:
            if not module.startswith(inside + "."):
                found.add(module)
    return found


@pytest.mark.parametrize("path", _python_files("kernels"), ids=_ids)
def test_kernels_import_only_torch_triton_cryptography_and_each_other(path: Path) -> None:
    assert not _strangers(path, "kernels", KERNELS_MAY_IMPORT)


@pytest.mark.parametrize("path", _python_files("accounting"), ids=_ids)
def test_accounting_imports_only_numpy_scipy_and_each_other(path: Path) -> None:
    inside = ACCOUNTING_MAY_IMPORT | ACCOUNTING_MAY_IMPORT_INSIDE_A_FUNCTION
    assert not _strangers(path, "accounting", inside)
    at_the_top = _import_time_tree(path)
    assert not _strangers(path, "accounting", ACCOUNTING_MAY_IMPORT, at_the_top)


@pytest.mark.parametrize("path", [*_python_files("kernels"), *CPP_FILES], ids=_ids)
def test_kernels_do_not_speak_of_privacy_parameters(path: Path) -> None:
    text = path.read_text(encoding="utf-8").lower()
    assert not [word for word in NOT_IN_KERNELS if word in text]


def _floor_name(path: Path) -> str:
    inside = path.relative_to(ROOT / "dpflash")
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


@pytest.mark.parametrize("path", _python_files("dpflash"), ids=_ids)
def test_a_file_of_dpflash_imports_only_from_lower_floors(path: Path) -> None:
    own = _floor_name(path)
    assert own in FLOORS, f"{_ids(path)} has no floor: add it to FLOORS in this test"
    for module, name in _imports(path):
        parts = module.split(".")
        if parts[0] != "dpflash":
            continue
        if len(parts) > 1:
            target = parts[1]
        elif name in FLOORS or name in ("kernels", "accounting"):
            target = name
        else:
            target = "__init__"
        if target in ("kernels", "accounting", own):
            continue
        assert target in FLOORS, f"{_ids(path)} imports dpflash.{target}, which has no floor"
        assert FLOORS[target] < FLOORS[own], (
            f"{_ids(path)} (floor {FLOORS[own]}) imports {target} (floor {FLOORS[target]})"
        )


@pytest.mark.parametrize("path", _python_files("dpflash"), ids=_ids)
def test_dpflash_needs_only_its_dependencies_when_imported(path: Path) -> None:
    needed = {m.split(".")[0] for m, _ in _imports(path, _import_time_tree(path))}
    assert not needed - DPFLASH_MAY_IMPORT_AT_THE_TOP - sys.stdlib_module_names


@pytest.mark.parametrize(
    "path",
    [
        p
        for house in ("dpflash", "kernels", "accounting", "tests", "benchmarks")
        for p in _python_files(house)
    ],
    ids=_ids,
)
def test_nobody_imports_a_house_by_its_folder_name(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    absolute = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    absolute |= {
        n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level
    }
    assert not [m for m in absolute if m.split(".")[0] in ("kernels", "accounting", "benchmarks")]


def test_no_init_file_makes_tests_a_package() -> None:
    assert not [_ids(p) for p in _python_files("tests") if p.name == "__init__.py"]


def _in_a_fresh_process(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_dpflash_loads_no_optional_library(tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import dpflash, dpflash.cli\n"
        "[getattr(dpflash, name) for name in dpflash.__all__]\n"
        f"print(*(m for m in {NEVER_AT_THE_TOP!r} if m in set(sys.modules) - before))"
    )
    assert _in_a_fresh_process(code, tmp_path) == ""


def test_dpflash_imports_where_no_optional_library_is_installed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NEVER_AT_THE_TOP!r}))\n"
        "import dpflash, dpflash.kernels, dpflash.accounting, dpflash.nn\n"
        "[getattr(dpflash, name) for name in dpflash.__all__]; print('imported')"
    )
    assert _in_a_fresh_process(code, tmp_path) == "imported"


def test_no_module_takes_the_place_of_a_public_name(tmp_path: Path) -> None:
    """Importing a submodule makes it an attribute of the package."""
    modules = sorted(f"dpflash.{path.stem}" for path in (ROOT / "dpflash").glob("[a-z]*.py"))
    code = (
        "import importlib, types, dpflash\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "public = {n: getattr(dpflash, n) for n in dpflash.__all__}\n"
        "print(*(n for n, x in public.items() if isinstance(x, types.ModuleType)))"
    )
    modules_of_users = "accounting distributed losses nn patterns sampling"
    assert _in_a_fresh_process(code, tmp_path) == modules_of_users


def test_accounting_commands_start_without_torch_and_slow_parts_of_scipy(tmp_path: Path) -> None:
    run = "'--sample-rate', '0.01', '--steps', '9', '--delta', '1e-5'"
    code = (
        "import contextlib, io, sys\n"
        "from dpflash.accounting import PoissonGaussian\n"
        "from dpflash.cli import main\n"
        "from dpflash.ledger import Ledger\n"
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
