"""Options of `frugalvit quickstart`."""

from dataclasses import dataclass

from ..training.components.arguments import ArgumentParser, argument, check


# Images to train on that come with the package.
EMBEDDED_IMAGES = 12000


@dataclass
class QuickstartArguments:
    """Where to, and how long."""

    output_dir: str = argument("quickstart", "Folder for results.json, model/ and rois.png.")
    seed: int = argument(0, "Of initialization, order and augmentation.")
    epochs: int | None = argument(None, "Epochs of bootstrapping. Default: 4 with fast bfloat16 arithmetic, else 3.")
    images: int = argument(EMBEDDED_IMAGES, "Images to bootstrap on.")
    elastic_token_counts: list[int] | None = argument(
        None, "Counts of tokens that one student is to serve, for example 7 15, without [CLS]. Default: 15 alone."
    )

    def __post_init__(self):
        check(self.epochs, self.epochs is None or self.epochs > 0, "epochs", "1 or more")
        check(self.images, 128 <= self.images <= EMBEDDED_IMAGES, "images", f"from 128 to {EMBEDDED_IMAGES}")
        check(self.seed, self.seed >= 0, "seed", "0 or more")


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        [QuickstartArguments],
        "frugalvit quickstart",
        "From a ViT to a SparseFormer with a quarter of its tokens, on real images, in minutes.",
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
