"""`frugalvit evaluate`: how good a model is on a task."""

import json
import math

from .common.command_line import CommandParser
from .common.files import check_file_path, write_json
from .common.tables import format_table
from .evaluation import classification, knn, linear, retrieval, scienceqa, segmentation, zero_shot


def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="frugalvit evaluate", description=__doc__)
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    for task in (classification, knn, linear, segmentation, zero_shot, retrieval, scienceqa):
        task.add_parser(tasks)
    arguments = parser.parse_args(argv)
    if arguments.output:
        check_file_path(arguments.output)
    results = {"task": arguments.task, **arguments.evaluate(arguments)}
    for name, value in results.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"The {name} of {arguments.model} is {value}; its weights are damaged or it diverged.")
    if arguments.output:
        write_json(arguments.output, results)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(format_table([{"measure": name, "value": value} for name, value in results.items()]))
