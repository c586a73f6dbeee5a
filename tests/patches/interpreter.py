"""An interpreter that imports a patched release once, and runs each check of it in a fork.

Run as a program, its arguments are the modules to import. Each line of its input is a check as JSON; each line of its
output is `[exit status, stdout, stderr]` of the fork.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback


class Interpreter:
    """Runs checks; `with` ends it."""

    def __init__(self, python, environment, *modules):
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def run(self, source, folder, **environment):
        """The outcome of `source`, run as a program in `folder`."""
        self._process.stdin.write(json.dumps([source, str(folder), environment]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the interpreter ended with {self._process.wait()}"
        return subprocess.CompletedProcess(source, *json.loads(answer))


def main(modules):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(in_a_fork(*json.loads(line))), file=answers, flush=True)


def in_a_fork(source, folder, environment):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            os.environ.update(environment)
            os._exit(status_of(source))
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


def status_of(source):
    try:
        exec(compile(source, "<check>", "exec"), {"__name__": "__main__"})
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
