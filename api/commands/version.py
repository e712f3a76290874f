"""`mkc version`."""

from __future__ import annotations

import importlib.metadata
import platform

from mkc.api.commands.common import JsonOption, print_json, print_lines


def show_version(as_json: JsonOption = False) -> None:
    """Show the version of mkc and of its artifact format."""
    from mkc.compiler.artifact import FORMAT_VERSION

    version = importlib.metadata.version("mkc")
    if as_json:
        print_json(
            {
                "mkc": version,
                "artifact_format": FORMAT_VERSION,
                "python": platform.python_version(),
            }
        )
        return
    print_lines(
        f"mkc {version} (artifact format {FORMAT_VERSION}, python {platform.python_version()})"
    )
