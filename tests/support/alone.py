"""A process that refuses packages and runs Python programs in children, so that all share one import of torch.

It reads [argv of a program, ...] a line, as JSON, and answers with [exit code, stdout, stderr].
"""

import json
import multiprocessing
import os
import sys
import tempfile


def run_program(argv: list[str], descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
    sys.argv = ["-c", *argv[1:]]
    exec(compile(argv[0], "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    """Serve programs until stdin ends. The arguments are names of packages whose imports fail."""
    # None in place of a module: its import raises ModuleNotFoundError.
    sys.modules.update(dict.fromkeys(sys.argv[1:]))  # type: ignore[arg-type]
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            arguments = json.loads(line), [out.fileno(), err.fileno()]
            child = multiprocessing.get_context("fork").Process(target=run_program, args=arguments)
            child.start()
            child.join(240)
            child.kill()
            child.join()
            texts = [file.read() for file in (out, err) if not file.seek(0)]
        print(json.dumps([child.exitcode, *texts]), flush=True)


if __name__ == "__main__":
    main()
