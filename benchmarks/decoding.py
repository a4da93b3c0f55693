"""The effect of decoding no more than a model reads, beside decoding images whole and asking the image processor.

    python benchmarks/decoding.py --test TEST --sample SAMPLE

The shipped student of Caltech-101 embeds photographs twice, as `frugalvit.Embedder` does by default and with `exact`:
as they are in TEST (Caltech-101, small WebP files, which have one size), in SAMPLE (ImageNet, JPEG, 256 pixels), and
those of TEST as JPEGs of as many megapixels, enlarged: there are no larger photographs of these classes at hand.
Writes decoding.json: for each kind of file and number of tokens, the scales at which files were decoded, mean
difference of what the model is given in levels of 255, cosines of the embeddings and how many labels stay the same.
"""

import argparse
import collections
import io
from itertools import islice

import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.data import load_images, sample
from frugalvit.common.decoding import decode_image
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.num_tokens import using_tokens
from frugalvit.common.reading import Reader, share_read
from frugalvit.common.resources import checkpoint_path
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


QUALITY = 90
BATCH_SIZE = 32


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", required=True, help="parquet file of Caltech-101's test images")
    parser.add_argument("--sample", help="parquet file of ImageNet's images")
    parser.add_argument("--model", default=str(checkpoint_path("caltech101-sparseformer")), help="an elastic student")
    parser.add_argument("--megapixels", type=float, nargs="+", default=[0.21, 1.5, 12], help="default: 0.21 1.5 12")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[9, 16, 36, 64], help="default: 9 16 36 64")
    parser.add_argument("--limit", type=positive, default=500, help="photographs of each kind (default: 500)")
    add_results_argument(parser)
    arguments = parser.parse_args()
    model, processor = load_image_classifier(arguments.model, "cpu")
    test = [record["image"] for record in sample(load_images([arguments.test], "train"), arguments.limit, seed=0)]
    kinds = {"as they are": test}
    if arguments.sample:
        images = sample(load_images([arguments.sample], "train"), arguments.limit, seed=0)
        kinds["as they are, ImageNet"] = [record["image"] for record in images]
    rows = []
    for name, records in kinds.items():
        rows += measure(model, processor, name, records, arguments.tokens)
    for megapixels in arguments.megapixels:
        records = (enlarged(record, index, megapixels) for index, record in enumerate(test))
        rows += measure(model, processor, f"JPEG, {megapixels:g} megapixels", records, arguments.tokens)
    print(format_table(rows))
    settings = {name: getattr(arguments, name) for name in ("limit", "tokens", "megapixels")} | {"quality": QUALITY}
    write_table(arguments.results_dir / "decoding.json", settings, rows, data="Caltech-101, test images at random")


def enlarged(record: dict, index: int, megapixels: float) -> dict:
    """A photograph as a JPEG of so many pixels."""
    image = decode_image(record, index)
    factor = (1e6 * megapixels / (image.width * image.height)) ** 0.5
    size = [round(factor * length) for length in image.size]
    file = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY)
    return {"bytes": file.getvalue(), "path": None}


@torch.inference_mode()
def measure(model, processor, kind: str, records, tokens: list[int]) -> list[dict]:
    """A row for each number of tokens."""
    exact = Reader(processor, exact=True)
    readers = {count: Reader(processor, share_read(model, count)) for count in tokens}
    scales, levels = {count: collections.Counter() for count in tokens}, {count: [] for count in tokens}
    found = {count: ([], []) for count in tokens}
    records = enumerate(tqdm(records, desc=kind, leave=False))
    while batch := list(islice(records, BATCH_SIZE)):
        whole = [decode_image(record, index) for index, record in batch]
        expected = exact.batch([exact.pixels(image) for image in whole])
        for count, reader in readers.items():
            images = [decode_image(record, index, reader.at_least) for index, record in batch]
            scales[count].update(round(a.width / b.width) for a, b in zip(whole, images, strict=True))
            given = reader.batch([reader.pixels(image) for image in images])
            seen = [reader.format.denormalize(pixels) for pixels in (given, expected)]
            levels[count].append(255 * (seen[0] - seen[1]).abs().mean((1, 2, 3)))
            with using_tokens(model, count):
                for pixels, several in zip((expected, given), found[count], strict=True):
                    several.append(model.base_model(pixels).pooler_output)
    rows = []
    for count in tokens:
        before, after = map(torch.cat, found[count])
        cosines = F.cosine_similarity(before, after)
        same = model.classifier(before).argmax(1) == model.classifier(after).argmax(1)
        rows.append(
            {
                "files": kind,
                "num_tokens": count,
                "images": len(before),
                "scales": {f"1/{scale}": number for scale, number in sorted(scales[count].items())},
                "levels": torch.cat(levels[count]).mean().item(),
                "cosine": cosines.mean().item(),
                "least_cosine": cosines.min().item(),
                "other_labels": 1 - same.double().mean().item(),
            }
        )
    return rows


if __name__ == "__main__":
    main()
