"""`frugalvit evaluate`: the scores of a model on a task."""

import importlib
import json
import math

from .common.files import check_file_path, write_json
from .common.tables import format_table
from .options.evaluate import parse


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.output:
        check_file_path(arguments.output)
    task = importlib.import_module(f"frugalvit.evaluation.{arguments.task.replace('-', '_')}")
    results = {"task": arguments.task, **task.run(arguments)}
    for name, value in results.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"The {name} of {arguments.model} is {value}; its weights are damaged or it diverged.")
    if arguments.output:
        write_json(arguments.output, results)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(format_table([{"measure": name, "value": value} for name, value in results.items()]))
