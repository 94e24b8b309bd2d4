"""The environment variables that deepinfer reads: one table, no other place.

No variable is needed for anything, and an argument always beats a variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["VARIABLES", "Variable", "read_variable", "variable_problems"]

_PREFIX = "DEEPINFER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        type: "choice", "path" or "text".
        default: What happens without it, in words.
        doc: What it does, one sentence.
        choices: Accepted values of a "choice".
    """

    name: str
    type: str
    default: str
    doc: str
    choices: tuple[str, ...] = ()

    def parse(self, text: str) -> str:
        """Checks a value.

        Args:
            text: The variable's text.

        Returns:
            The text without surrounding blanks; choices in lower case.

        Raises:
            ConfigError: The value is empty or not one of the choices.
        """
        text = text.strip()
        if self.choices:
            return checks.check_choice(self.name, text.lower(), self.choices, ConfigError)
        return checks.check_text(self.name, text, ConfigError, "Unset it to use the default.")


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="DEEPINFER_ACCELERATOR",
        type="choice",
        default="what the machine has: nvidia, else cpu",
        doc="Backend of the kernels, and what build.sh sets up for.",
        choices=("nvidia", "cpu", "ascend"),
    ),
    Variable(
        name="DEEPINFER_HF_MODEL_DIR",
        type="path",
        default="the embedded checkpoint",
        doc="Folder of the checkpoint that the scripts in examples/ load.",
    ),
    Variable(
        name="DEEPINFER_SHARED_DATA",
        type="path",
        default="the folder `shared` beside the repository",
        doc="Folder of test data too large for the repository; tests that need it are skipped without it.",
    ),
)


def read_variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Reads one variable of the table.

    Args:
        name: A name in `VARIABLES`.
        environ: The environment; the process's own when None.

    Returns:
        The checked value, or None when it is not set.

    Raises:
        ConfigError: The variable is not in the table, or its value is malformed.
    """
    table = {variable.name: variable for variable in VARIABLES}
    checks.check_keys("the table of environment variables", [name], table, ConfigError)
    text = (os.environ if environ is None else environ).get(name)
    return None if text is None else table[name].parse(text)


def variable_problems(environ: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the DEEPINFER_* variables that are set.

    Args:
        environ: The environment; the process's own when None.

    Returns:
        One sentence a malformed or unknown variable, in order of name; unknown ones with the nearest known name.
    """
    environ = os.environ if environ is None else environ
    table = {variable.name: variable for variable in VARIABLES}
    problems = []
    for name in sorted(environ):
        if not name.startswith(_PREFIX):
            continue
        if name not in table:
            rest = name.removeprefix(_PREFIX)
            nearest = checks.nearest_name(rest, [known.removeprefix(_PREFIX) for known in table])
            hint = f" Did you mean {_PREFIX}{nearest}?" if nearest else ""
            problems.append(f"{name} is set and means nothing to deepinfer.{hint}")
            continue
        try:
            table[name].parse(environ[name])
        except ConfigError as error:
            problems.append(str(error))
    return problems
