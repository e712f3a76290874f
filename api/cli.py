"""The command line: registers the verbs and turns errors into exit codes.

Exit codes: 0 done, 1 a check failed, 2 bad input, 70 a fault of mkc itself. Modules of verbs import
nothing heavy before their verb runs, so that `mkc --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from mkc.api.commands import (
    bench,
    check,
    compile,
    doctor,
    explain,
    generate,
    inspect,
    models,
    pack,
    version,
)
from mkc.compiler.errors import MkcError

BAD_INPUT = 2
INTERNAL_ERROR = 70

app = typer.Typer(
    name="mkc",
    help="Compile the description of a language model into one persistent CUDA kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("compile")(compile.compile_model)
app.command("check")(check.check_model)
app.command("bench")(bench.bench_model)
app.command("pack")(pack.pack_checkpoint)
app.command("generate")(generate.generate_tokens)
app.command("inspect")(inspect.inspect_artifact)
app.command("explain")(explain.explain_artifact)
app.command("models")(models.list_models)
app.command("import")(models.import_config)
app.command("doctor")(doctor.run_doctor)
app.command("version")(version.show_version)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit code, errors are told on standard error."""
    try:
        app(args=list(arguments), prog_name="mkc")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except MkcError as error:
        _say(str(error))
        return error.exit_status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            return _internal(error)
        _say(f"error: {error.filename}: {error.strerror}")
        return BAD_INPUT
    except Exception as error:
        return _internal(error)
    return 0


def _internal(error: Exception) -> int:
    """Tells of a fault of mkc itself; with its traceback under MKC_DEBUG=1."""
    if os.environ.get("MKC_DEBUG") == "1":
        traceback.print_exc()
    _say(f"internal error: {type(error).__name__}: {error}")
    _say("  please report it, with the output of the same command under MKC_DEBUG=1")
    return INTERNAL_ERROR


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    """Entry point of the `mkc` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
