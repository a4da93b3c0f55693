"""How often what `frugalvit calibrate` promises is broken, and what it saves.

    python benchmarks/calibration.py --test TEST --other OTHER

The shipped student of Caltech-101 looks once at all test images of Caltech-101 (TEST) and at photographs of clothes
(OTHER), with each number of tokens. Then, for each of --splits random splits, the confidence is found on some of the
images, without their labels, and looked at on the others. A promise is broken on `rest` if more of these others get
another label than from the most tokens than was promised, which chance among them does, too, and `in_all` if more of
all images do, whose share is no estimate. `other kind` are photographs of clothes with the confidence found on
Caltech-101. Logits are kept under --runs-dir and found again. Writes calibration.json.
"""

import argparse
from pathlib import Path

import torch

from frugalvit.calibrate import LabelPromise, look
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.comparison import using_tokens
from frugalvit.common.data import load_images
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.macs import count_macs
from frugalvit.common.reading import Reader
from frugalvit.common.risk import CONFIDENCES, last_safe, stop_when_sure
from frugalvit.common.tables import format_table
from frugalvit.resources import checkpoint_path
from shared import add_results_argument, write_table


LOOKS = [(9, 64), (16, 64), (9, 25, 64)]
DISAGREEMENTS = [0.01, 0.02, 0.05]
# Images to calibrate with.
IMAGES = [250, 500, 1000]
CERTAINTY = 0.95
NAMES = {"test": "Caltech-101", "other": "clothes"}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", required=True, help="parquet file of Caltech-101's test images")
    parser.add_argument("--other", required=True, help="parquet file of other photographs")
    parser.add_argument("--splits", type=positive, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the splits (default: %(default)s)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/calibration"), help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()
    model, processor = load_image_classifier(checkpoint_path("caltech101-sparseformer"), "cpu")
    counts = sorted({count for looks in LOOKS for count in looks})
    macs = {}
    for count in counts:
        with using_tokens(model, count):
            macs[count] = count_macs(model, model.config.image_size).macs_with_attention
    logits = {name: logits_of(arguments, name, model, processor, counts) for name in NAMES}
    rows = []
    for looks in LOOKS:
        tables = {name: Table({count: found[count] for count in looks}, macs) for name, found in logits.items()}
        for disagreement in DISAGREEMENTS:
            for images in IMAGES:
                for name, table in tables.items():
                    if images < len(table):
                        about = {"images_of": NAMES[name], "looks": list(looks)}
                        about |= {"disagreement": disagreement, "images": images}
                        others = tables["other"] if name == "test" else None
                        if row := of_splits(table, disagreement, images, arguments, others):
                            rows.append(about | row)
    print(format_table(rows))
    settings = {"splits": arguments.splits, "seed": arguments.seed, "certainty": CERTAINTY, "macs": macs}
    data = {NAMES[name]: len(next(iter(found.values()))) for name, found in logits.items()}
    write_table(arguments.results_dir / "calibration.json", settings, rows, data=data)


def logits_of(arguments, name: str, model, processor, counts: list[int]) -> dict[int, torch.Tensor]:
    """With each number of tokens, now or before."""
    file = arguments.runs_dir / f"{name}.pt"
    if not file.is_file():
        images = load_images([getattr(arguments, name)], "train")
        logits = LabelPromise(0.02, CERTAINTY).answers(model, processor)
        found = look(model, logits, Reader(processor), images, counts, batch_size=32)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, file)
    return torch.load(file)


class Table:
    """What each image gets at each confidence: another label than from the last look, and at which cost.

    Args:
        logits (mapping of `int` to `torch.Tensor`): By number of tokens, in the order of the looks.
        macs (mapping of `int` to `int`): Cost of a look.
    """

    def __init__(self, logits: dict[int, torch.Tensor], macs: dict[int, int]):
        self.labels = list(logits.values())[-1].argmax(-1)
        self.full = macs[list(logits)[-1]]
        costs = torch.tensor([macs[count] for count in logits]).double().cumsum(0)
        found = [stop_when_sure(logits, confidence) for confidence in CONFIDENCES]
        self.wrong = torch.stack([labels != self.labels for labels, _ in found])
        self.costs = torch.stack([costs[looks - 1] for _, looks in found])

    def __len__(self) -> int:
        return len(self.labels)

    def share_wrong(self, choice: int, images=slice(None)) -> float:
        return self.wrong[choice, images].double().mean().item()


def of_splits(table: Table, disagreement: float, images: int, arguments, others: Table | None) -> dict | None:
    """Means over the splits; `None` where so few images promise nothing."""
    generator = torch.Generator().manual_seed(arguments.seed)
    rows = []
    for _ in range(arguments.splits):
        order = torch.randperm(len(table), generator=generator)
        # What `choose_confidence` does.
        choice, rest = last_safe(table.wrong[:, order[:images]], disagreement, CERTAINTY), order[images:]
        if choice is None:
            return None
        rows.append(
            {
                "confidence": CONFIDENCES[choice],
                "saved": table.full / table.costs[choice, rest].mean().item(),
                "rest": table.share_wrong(choice, rest),
                "rest_broken": table.share_wrong(choice, rest) > disagreement,
                "in_all_broken": table.share_wrong(choice) > disagreement,
            }
        )
        if others is not None:
            rows[-1]["other_kind"] = others.share_wrong(choice)
            rows[-1]["other_kind_broken"] = others.share_wrong(choice) > disagreement
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


if __name__ == "__main__":
    main()
