"""``torch-hal new-backend NAME``: a complete plugin to start from, which the guide for authors goes through."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from torch_hal.plugins import GROUP, NATIVE

EXPIRES = datetime.timedelta(days=182)  # by then the template's known failure is mended, or looked at again

# A file of the distribution, in which PACKAGE is the name of its package, and the template of that file.
FILES: Mapping[str, str] = {
    "pyproject.toml": "pyproject.toml.jinja",
    "README.md": "README.md.jinja",
    ".gitignore": "gitignore.jinja",
    "PACKAGE/__init__.py": "init.py.jinja",
    "PACKAGE/kernels.py": "kernels.py.jinja",
    "PACKAGE/conformance.toml": "conformance.toml.jinja",
    "PACKAGE/py.typed": "py.typed.jinja",
    "tests/test_conformance.py": "test_conformance.py.jinja",
}

NEXT = """\
{folder} holds a backend '{name}' with three kernels, one of them wrong on purpose. Next:

  cd {folder}
  python -m pip install -e .
  torch-hal conformance --backend {name}

What you will see, and how to go on: docs/conformance-guide.md, "From an empty folder to a passing core"."""


class NewBackendError(Exception):
    """The backend was not written, and why: one line."""


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and '_', such as acme.")],
    directory: Annotated[Path | None, typer.Option(help="Where to write it; default: torch-hal-NAME, here.")] = None,
) -> None:
    """Write a complete backend to start from, which installs, runs, and fails the suite in one op."""
    try:
        folder = write(name, directory)
    except NewBackendError as error:
        typer.echo(f"torch-hal: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(NEXT.format(folder=shlex.quote(str(folder)), name=name))


def write(name: str, directory: Path | None = None, today: datetime.date | None = None) -> Path:
    """Write the distribution of backend ``name`` and return its folder. Raises NewBackendError."""
    _check_name(name)
    folder = directory or Path(_distribution(name))
    files = render(name, today or datetime.date.today())
    try:
        if folder.exists() and any(folder.iterdir()):
            raise NewBackendError(f"{folder} is not empty: name a new folder with --directory, or empty this one")
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NewBackendError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return folder


def render(name: str, today: datetime.date) -> dict[str, str]:
    """The distribution's files, path -> text."""
    try:
        import jinja2  # here, so that whoever has the command alone is not told of it at each call
    except ModuleNotFoundError:
        raise NewBackendError("this needs jinja2: python -m pip install 'torch-hal[conformance]'") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "template"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    values = {
        "name": name,
        "package": _package(name),
        "distribution": _distribution(name),
        "expires": today + EXPIRES,
    }
    return {
        path.replace("PACKAGE", _package(name)): environment.get_template(template).render(values)
        for path, template in FILES.items()
    }


def _package(name: str) -> str:
    return f"torch_hal_{name}"


def _distribution(name: str) -> str:
    return _package(name).replace("_", "-").rstrip("-")


def _check_name(name: str) -> None:
    """Refuse what discovery would refuse, and what is there already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise NewBackendError(f"{name!r} is no name for a backend: use lower-case letters, digits and '_', as in acme")
    if name == NATIVE:
        raise NewBackendError(f"'{NATIVE}' is torch_hal's own backend: choose another name")
    for entry in importlib.metadata.entry_points(group=GROUP, name=name):
        raise NewBackendError(f"a backend '{name}' is installed already ({entry.value}): choose another name")
    if importlib.util.find_spec(_package(name)) is not None:
        raise NewBackendError(f"a package {_package(name)} is installed already: choose another name")
