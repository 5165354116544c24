"""Every habit of the project as a session; ``nox -l`` lists them.

They share one environment, ``.nox/dev``, made at the first and made anew only when what it installs has changed, so
that every other session starts at once. Only ``package`` makes environments of its own, to see what a user gets.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nox

if sys.version_info < (3, 11):  # noqa: UP036 (read before anything enforces the minimum)
    raise SystemExit(f"torch-hal needs Python 3.11 or newer, and nox runs on {sys.version.split()[0]}")

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "imports", "tests", "docs", "package"]

ROOT = Path(__file__).parent
DEV = ROOT / ".nox" / "dev"
CONSTRAINTS = ROOT / "constraints.txt"
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS)


@nox.session
def demo(session: nox.Session) -> None:
    """Devices, kernels with the reasons for each choice, and a small DeepSeek that generates."""
    ensure_dev(session)
    run(session, DEV, "python", "-m", "torch_hal_deepseek.demo", *session.posargs)
    if not session.posargs:
        run(session, DEV, "python", "-m", "austen.evaluate", "--bytes", "4096")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test, on all cores; or what pytest arguments after ``--`` say."""
    ensure_dev(session)
    everything = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")
    one_thread = {"OMP_NUM_THREADS": "1"}  # a process a core is enough
    run(session, DEV, "python", "-m", "pytest", *(session.posargs or everything), **one_thread)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, the linter and the formatter; ``-- --fix`` mends what it can."""
    ensure_dev(session)
    fix = "--fix" in session.posargs
    run(session, DEV, "ruff", "check", *(["--fix"] if fix else []), ".")
    run(session, DEV, "ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    ensure_dev(session)
    run(session, DEV, "mypy", *session.posargs)


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom."""
    ensure_dev(session)
    run(session, DEV, "lint-imports", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site, strictly, into ``site/``; ``-- serve`` shows it while you write."""
    ensure_dev(session)
    run(session, DEV, "mkdocs", *(session.posargs or ("build", "--strict", "--quiet")))


@nox.session
def bench(session: nox.Session) -> None:
    """``nox -s bench -- NAME [arguments]`` runs ``hal/bench/NAME.py`` and prints its JSON."""
    ensure_dev(session)
    known = {path.stem: path for path in sorted((ROOT / "hal" / "bench").glob("[a-z]*.py"))}
    name, *arguments = session.posargs or [""]
    if name not in known:
        session.error(f"say which benchmark: nox -s bench -- {{{','.join(known)}}}")
    run(session, DEV, "python", str(known[name]), "--json", *arguments)


@nox.session
def conformance(session: nox.Session) -> None:
    """``-- NAME [options of torch-hal conformance]`` judges a backend; without NAME, every one that can run here."""
    ensure_dev(session)
    name, *options = session.posargs or [""]
    if name and not name.startswith("-"):
        run(session, DEV, "torch-hal", "conformance", "--backend", name, *options)
    else:
        run(session, DEV, "python", "-m", "torch_hal_conformance.everyone", *session.posargs)


@nox.session
def conformance_selftest(session: nox.Session) -> None:
    """The suite against itself: wrong backends die, right ones live; ``-- --help`` lists its options."""
    ensure_dev(session)
    run(session, DEV, "python", "-m", "torch_hal_conformance.selftest", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel from the sdist, install it where nothing else is, and use it from an empty folder."""
    ensure_dev(session)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(session, DEV, "python", "-m", "build", "--no-isolation", str(ROOT))
    [wheel] = (ROOT / "dist").glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        clean, elsewhere = Path(scratch, "environment"), Path(scratch, "elsewhere")
        elsewhere.mkdir()
        check = str(shutil.copy(ROOT / "hal" / "tests" / "check_installed.py", scratch))
        make_environment(session, clean, str(wheel))
        with session.chdir(elsewhere):
            run(session, clean, "python", "-I", check)
            install(session, clean, f"{wheel}[cli,deepseek]")
            run(session, clean, "torch-hal", "doctor")
            run(session, clean, "python", "-m", "torch_hal_deepseek.demo")


def ensure_dev(session: nox.Session) -> None:
    """Make the shared environment, unless it was made from these very files by this interpreter."""
    made_from = hashlib.sha256(sys.version.encode() + b"".join(path.read_bytes() for path in INPUTS)).hexdigest()
    stamp = DEV / "made-from"
    if stamp.exists() and stamp.read_text() == made_from:
        return
    session.log(f"making {DEV}: torch and the development tools are installed once, in a few minutes")
    make_environment(session, DEV, "-e", f"{ROOT}[dev]")
    stamp.write_text(made_from)


def make_environment(session: nox.Session, folder: Path, *requirements: str) -> None:
    """A new virtual environment with these requirements, for the interpreter that runs nox."""
    session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder))
    install(session, folder, *requirements)


def install(session: nox.Session, environment: Path, *requirements: str) -> None:
    """Install, with the development tools and torch as ``constraints.txt`` has them."""
    run(session, environment, "python", "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *requirements)


def run(session: nox.Session, environment: Path, program: str, *arguments: str, **variables: str) -> None:
    """Run a program of ``environment``, which also comes first on the program's own PATH."""
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    env = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(environment),
        "PYTHONPATH": None,
        "NO_MKDOCS_2_WARNING": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **variables,
    }
    session.run(str(programs / program), *arguments, env=env)
