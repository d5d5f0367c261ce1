"""Runs scripts in processes of their own, forked from one that has imported what takes long: its arguments.

A line of JSON comes in for each: the script, its environment, and the file for what it prints. Its exit status
goes out.
"""

import gc
import importlib
import json
import os
import sys
import traceback


def run(script: str, environment: dict[str, str], output: str) -> int:
    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


for module in sys.argv[1:]:
    importlib.import_module(module)
# Else the collector would write to, and so copy, all of this process's memory in each child.
gc.collect()
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if not child:
        status = run(**json.loads(line))
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201
