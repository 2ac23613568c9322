"""The command line, as a process or in this one: the same answers, without the second that a process needs to start."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from postroad.surfaces import cli

Done = subprocess.CompletedProcess[str]


def apart(*arguments: str, folder: Path, environ: Mapping[str, str]) -> Done:
    """Run a command as a process of its own, in a folder and with this environment."""
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments], capture_output=True, check=False, timeout=60, text=True,
        cwd=folder, env={**environ, "POSTROAD_BUNDLED_SQLITE": "1"},
    )  # fmt: skip


def here(*arguments: str, folder: Path, environ: Mapping[str, str]) -> Done:
    """Run a command in this process. What it logs is on stderr, and modules of the folder are imported anew."""
    out, err = StringIO(), StringIO()
    told = logging.StreamHandler(err)
    logging.getLogger().addHandler(told)
    try:
        with (
            chdir(folder), patch.dict(os.environ, environ, clear=True), patch.object(sys, "path", [*sys.path]),
            patch.object(sys, "argv", ["postroad", *arguments]), patch.object(sys, "dont_write_bytecode", True),
            redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended,
        ):  # fmt: skip
            cli.main()
    finally:
        logging.getLogger().removeHandler(told)
        _forget(folder)
    return Done(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def _forget(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]
