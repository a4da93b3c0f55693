"""Promises of `frugalvit calibrate`: how often they are broken, and how much they save.

    python benchmarks/calibration.py --test TEST --other OTHER

The shipped student of Caltech-101 looks once at all test images of Caltech-101 (TEST) and at photographs of clothes
(OTHER), with each number of tokens. Then, for each of --splits random splits, the confidence is found on some of the
images, without their labels, and tried on the others. A promise is broken on `rest` if more of these others than
promised get another label than from the most tokens; chance may do that, too. It is broken `in_all` if more of all
images do, whose share is no estimate. `other kind` are photographs of clothes with the confidence found on
Caltech-101. The same is done for embeddings, for which the number of tokens is found that keeps a cosine. Logits and
embeddings are kept under --runs-dir and found again. Writes calibration.json.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from frugalvit.calibrate import CosinePromise, LabelPromise, costs_of, look
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.data import load_images
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.packing import pack_linear_layers
from frugalvit.common.reading import Reader
from frugalvit.common.resources import checkpoint_path
from frugalvit.common.risk import CONFIDENCES, last_safe, stop_when_sure
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


LOOKS = [(9, 64), (16, 64), (9, 25, 64)]
COSINES = [0.8, 0.9, 0.95]
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
    pack_linear_layers(model)
    counts = model.config.trained_token_counts
    macs = costs_of(model, counts)
    promises = {"logits": LabelPromise(0.02, CERTAINTY), "embeddings": CosinePromise(0.02, CERTAINTY, 0.9)}
    logits, embeddings = (
        {name: answers_of(arguments, name, what, promise, model, processor, counts) for name in NAMES}
        for what, promise in promises.items()
    )
    kinds = {}
    for looks in LOOKS:
        kinds["looks", looks] = {
            name: label_table({count: found[count] for count in looks}, macs) for name, found in logits.items()
        }
    for cosine in COSINES:
        kinds["cosine", cosine] = {name: cosine_table(found, macs, cosine) for name, found in embeddings.items()}
    rows = []
    for (kind, choice), tables in kinds.items():
        for disagreement in DISAGREEMENTS:
            for images in IMAGES:
                for name, table in tables.items():
                    if images < len(table):
                        about = {"images_of": NAMES[name], kind: choice, "disagreement": disagreement}
                        others = tables["other"] if name == "test" else None
                        if row := of_splits(table, disagreement, images, arguments, others):
                            rows.append(about | {"images": images} | row)
    print(format_table([row for row in rows if "looks" in row]))
    print(format_table([row for row in rows if "cosine" in row]))
    settings = {"splits": arguments.splits, "seed": arguments.seed, "certainty": CERTAINTY, "macs": macs}
    data = {NAMES[name]: len(next(iter(found.values()))) for name, found in logits.items()}
    write_table(arguments.results_dir / "calibration.json", settings, rows, data=data)


def answers_of(arguments, name: str, what: str, promise, model, processor, counts) -> dict[int, torch.Tensor]:
    """Logits or embeddings with each number of tokens, computed now or before."""
    file = arguments.runs_dir / f"{name}-{what}.pt"
    if not file.is_file():
        images = load_images([getattr(arguments, name)], "train")
        found = look(model, promise.answers(model, processor), Reader(processor), images, counts, batch_size=32)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, file)
    return torch.load(file)


@dataclass
class Table:
    """For each choice and image, whether the answer is wrong, and the cost.

    Args:
        choice (`str`), choices (sequence of `float`): Name of the number that is chosen, and its values, the safest
            first.
        wrong (`torch.Tensor`): `(choices, images)` bool, whether the answer is other than from the most tokens.
        costs (`torch.Tensor`): `(choices, images)`, the multiply-accumulates of all looks at an image.
        full (`int`): Multiply-accumulates of a look with the most tokens.
    """

    choice: str
    choices: Sequence[float]
    wrong: torch.Tensor
    costs: torch.Tensor
    full: int

    def __len__(self) -> int:
        return self.wrong.shape[1]

    def share_wrong(self, choice: int, images=slice(None)) -> float:
        return self.wrong[choice, images].double().mean().item()


def label_table(logits: dict[int, torch.Tensor], macs: dict[int, int]) -> Table:
    """The table of labels, by the confidence from which on few tokens are enough; logits in the order of the looks."""
    labels = list(logits.values())[-1].argmax(-1)
    costs = torch.tensor([macs[count] for count in logits]).double().cumsum(0)
    found = [stop_when_sure(logits, confidence) for confidence in CONFIDENCES]
    wrong = torch.stack([each != labels for each, _ in found])
    return Table(
        "confidence", CONFIDENCES, wrong, torch.stack([costs[looks - 1] for _, looks in found]), macs[[*logits][-1]]
    )


def cosine_table(embeddings: dict[int, torch.Tensor], macs: dict[int, int], cosine: float) -> Table:
    """The table of embeddings, by the number of tokens."""
    counts = [*embeddings][::-1]
    most = embeddings[counts[0]]
    wrong = torch.stack([F.cosine_similarity(embeddings[count], most) < cosine for count in counts])
    costs = torch.tensor([float(macs[count]) for count in counts]).unsqueeze(1).expand(-1, len(most))
    return Table("num_tokens", counts, wrong, costs, macs[counts[0]])


def of_splits(table: Table, disagreement: float, images: int, arguments, others: Table | None) -> dict | None:
    """Means over the splits; `None` if so few images allow no promise."""
    generator = torch.Generator().manual_seed(arguments.seed)
    rows = []
    for _ in range(arguments.splits):
        order = torch.randperm(len(table), generator=generator)
        # What `choose_confidence` and `CosinePromise` do.
        choice, rest = last_safe(table.wrong[:, order[:images]], disagreement, CERTAINTY), order[images:]
        if choice is None:
            return None
        rows.append(
            {
                table.choice: table.choices[choice],
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
