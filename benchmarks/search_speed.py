"""Parts of the time of `frugalvit search`, and the savings by faiss, in one run.

    pip install -e ".[faiss]"
    python benchmarks/search_speed.py

An index of random embeddings is searched as the command does, which reads it from the disk, with faiss and without.
The share of faiss or PyTorch is also timed alone: the products with the query and the best of them, exact, not
approximate. Numbers are medians over rounds in which both take turns. No model embeds the query. Writes
search_speed.json.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import faiss
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

import frugalvit.search
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.tables import format_table
from frugalvit.index import SHARD, read_shards
from frugalvit.search import nearest, search
from shared import add_results_argument, write_table


TOP = 12
LIBRARIES = {"PyTorch": None, "faiss": faiss}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=positive, default=2**17, help="default: %(default)s")
    parser.add_argument("--width", type=positive, default=512, help="of an embedding (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    faiss.omp_set_num_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    query = F.normalize(torch.randn(arguments.width, generator=generator), dim=0)
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder)
        write_index(index, arguments.images, arguments.width, generator)
        embeddings = [shard.embeddings for shard in read_shards(index)]
        calls = {
            "search": lambda: [found.cosine for found in search(query, read_shards(index), TOP)],
            "products and the best": lambda: nearest(embeddings, query, TOP)[0],
        }
        seconds, answers = defaultdict(list), {}
        for _ in tqdm(range(arguments.rounds), desc="rounds"):
            for (name, call), (by, library) in itertools.product(calls.items(), LIBRARIES.items()):
                with patch.object(frugalvit.search, "faiss", library):
                    start = time.perf_counter()
                    answers[name, by] = call()
                    seconds[name, by].append(time.perf_counter() - start)
    first, *others = (torch.tensor(answer) for answer in answers.values())
    assert all(torch.allclose(first, other, atol=1e-5) for other in others), answers
    rows = [{"part": name, "by": by, "seconds": statistics.median(values)} for (name, by), values in seconds.items()]
    print(format_table(rows))
    settings = {name: getattr(arguments, name) for name in ("images", "width", "rounds")}
    write_table(
        *(arguments.results_dir / "search_speed.json", settings, rows),
        threads=torch.get_num_threads(),
        faiss=faiss.__version__,
    )


def write_index(folder: Path, images: int, width: int, generator: torch.Generator):
    """Random embeddings, as `frugalvit index` writes them."""
    for number, start in enumerate(range(0, images, SHARD)):
        names = [f"photographs/{index:08d}.jpg" for index in range(start, min(start + SHARD, images))]
        embeddings = F.normalize(torch.randn(len(names), width, generator=generator), dim=1)
        files = json.dumps([[name, 100_000, 1_700_000_000_000_000_000] for name in names])
        path = folder / f"embeddings-{number:05d}-0.safetensors"
        save_file({"embeddings": embeddings}, path, {"files": files})


if __name__ == "__main__":
    main()
