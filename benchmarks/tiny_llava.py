"""Make a tiny LLaVA from shipped models, to try `frugalvit swap` and `frugalvit align-llava`.

The vision tower is `cifar10-vit`, and the language model is taken from `cifar10-sparseformer-llava`. Projector and
language model are trained on questions about the images that come with frugalvit. An image has 64 image tokens.

    python benchmarks/tiny_llava.py --output LLAVA
"""

from pathlib import Path

from accelerate.utils import set_seed
from clip_tables import answer_accuracy, make_llava, train_answers
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from frugalvit import SparseFormerLlavaForConditionalGeneration, SparseFormerLlavaProcessor, checkpoint_path
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import load_images
from frugalvit.training.loading import load_pretrained
from shared import make_parser


# The accuracy is measured on at most this many test images.
TEST_IMAGES = 500


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="LLAVA", help="new folder")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args(argv)

    set_seed(arguments.seed)
    llava, processor = untrained_llava()
    images = load_images(SUBSET, f"train[:{arguments.images}]")
    train_answers(llava, processor, images, arguments.output, arguments.steps, arguments.seed)
    found = answer_accuracy(llava, processor, load_images(SUBSET, f"test[:{min(arguments.images, TEST_IMAGES)}]"))
    print(f'Wrote {arguments.output}. Right answers to "what is this ?" on test images: {found["what is this"]:.1%}.')


def untrained_llava() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    vit, speaker = checkpoint_path("cifar10-vit"), checkpoint_path("cifar10-sparseformer-llava")
    shipped = SparseFormerLlavaForConditionalGeneration.from_pretrained(speaker)
    llava, processor = make_llava(
        AutoModelForImageClassification.from_pretrained(vit).vit,
        shipped.config.text_config,
        load_pretrained(AutoImageProcessor, vit),
        SparseFormerLlavaProcessor.from_pretrained(speaker).tokenizer,
    )
    llava.model.language_model.load_state_dict(shipped.model.language_model.state_dict())
    llava.lm_head.load_state_dict(shipped.lm_head.state_dict())
    return llava, processor


if __name__ == "__main__":
    main()
