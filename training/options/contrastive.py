"""Options of `frugalvit contrastive`."""

from dataclasses import dataclass

from ..components.arguments import (
    ArgumentParser,
    DataArguments,
    OptimizerArguments,
    RunArguments,
    argument,
    check,
    check_at_least,
)


PROG = "frugalvit contrastive"

SENTENCES = [
    "a photo of a {} .",
    "a small photo of a {} .",
    "a blurry photo of the {} .",
    "a picture of one {} .",
    "this is a {} .",
    "there is a {} in this image .",
    "the {} .",
    "a {} .",
]


@dataclass
class ClipArguments:
    """The CLIP to train."""

    vision: str = argument("", "Fields of CLIPVisionConfig, for example image_size=32,patch_size=4,hidden_size=192.")
    text: str = argument("", "Fields of CLIPTextConfig, for example hidden_size=128,num_hidden_layers=2.")
    projection_dim: int = argument(128, "Width of the space in which both sides meet.")
    sentences: list[str] = argument(SENTENCES, "Sentences with {} where the name of a class goes.")

    def __post_init__(self):
        check_at_least(self, 1, "projection_dim")
        for sentence in self.sentences:
            check(sentence, sentence.count("{}") == 1, "sentences", "sentences with one {} in each")


GROUPS = [ClipArguments, DataArguments, OptimizerArguments, RunArguments]


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        GROUPS, PROG, "Train a small CLIP from labeled images: an image's captions are sentences about its class."
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
