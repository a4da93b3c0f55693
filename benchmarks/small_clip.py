"""Train a small CLIP from labeled images: an image's captions are sentences about its class.

    accelerate launch benchmarks/small_clip.py --output OUT --vision hidden_size=192,… --text …

Images and sentences of one class are each other's positives (Yang et al. 2022, UniCL). If a batch has two images of a
class, each also matches the other's sentence. Several processes compare images with their own share of the
batch. The tokenizer knows the words of the sentences.
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

from frugalvit.common.labels import class_names
from frugalvit.common.metrics import TopKAccuracy
from frugalvit.common.splits import load_splits
from frugalvit.common.views import CAPTION, EvalView, ImageFormat, random_seed
from frugalvit.training.components.arguments import (
    ArgumentParser,
    DataArguments,
    OptimizerArguments,
    RunArguments,
    argument,
    check,
    check_at_least,
    read_values,
    run_as_program,
)
from frugalvit.training.components.augmentation import SmallDataView
from frugalvit.training.components.cards import count_measured, name_images, say_license
from frugalvit.training.components.checkpoints import TrainingState
from frugalvit.training.components.images import labeled_images
from frugalvit.training.components.optimizers import optimizer_with_schedule
from frugalvit.training.components.runs import ImageTrainingArguments, start_run, training_arguments
from frugalvit.training.trainer import ImageTrainer


PROG = "benchmarks/small_clip.py"
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


@dataclass
class ContrastiveArguments(OptimizerArguments, ImageTrainingArguments):
    """Transformers' `TrainingArguments`, and the optimizer of other trainings (`OptimizerArguments`).

    Raises:
        ValueError: if a value does not fit.
    """


class ContrastiveTrainer(ImageTrainer):
    """Transformers' `Trainer` of a CLIP that learns from labeled images.

    Args:
        model (`CLIPModel`): The CLIP.
        args (`ContrastiveArguments`): How it is trained.
        tokens (`torch.Tensor`): Token ids of the sentences about each class, `(classes, sentences, length)` int64.
        processing_class (`CLIPProcessor`): Its image processor and tokenizer.
        train_dataset, eval_dataset, test_dataset: Images with labels, see `BootstrapTrainer`.
    """

    def __init__(
        self,
        model: CLIPModel,
        args: ContrastiveArguments,
        tokens: torch.Tensor,
        processing_class: CLIPProcessor,
        train_dataset,
        eval_dataset=None,
        test_dataset=None,
        **command,
    ):
        train, evaluation, test = labeled_images(train_dataset, eval_dataset, test_dataset)
        image_format = ImageFormat.from_processor(processing_class.image_processor)
        super().__init__(
            *(model, args),
            train=(train, SmallDataView(image_format)),
            evaluation=(evaluation, EvalView(image_format)),
            test=test,
            processing_class=processing_class,
            **command,
        )
        self.tokens = tokens.to(self.accelerator.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        chosen = [
            random_seed(self.args.seed, epoch, index, CAPTION) % self.tokens.shape[1]
            for epoch, index in zip(inputs["epoch"].tolist(), inputs["index"].tolist(), strict=True)
        ]
        chosen = torch.tensor(chosen).to(labels.device, non_blocking=True)
        outputs = model(input_ids=self.tokens[labels, chosen], pixel_values=inputs["pixel_values"])
        targets = (labels[:, None] == labels).float()
        targets /= targets.sum(1, keepdim=True)
        logits = outputs.logits_per_image.float()
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.mT, targets)) / 2
        return (loss, outputs) if return_outputs else loss

    def make_optimizer(self) -> tuple:
        return optimizer_with_schedule(self.model, self.args, self.epochs, self.loader.steps_per_epoch)

    def measure(self, model, loader) -> dict[str, float]:
        return evaluate_zero_shot(self.accelerator, model, self.tokens, loader)

    def summary(self, state: TrainingState) -> str:
        accuracy = ", not evaluated"
        if "accuracy" in state.measured:
            accuracy = f": zero-shot accuracy {state.measured['accuracy']:.2%}{count_measured(self.run)}"
        return f"A CLIP trained on {name_images(self.data.dataset)} and sentences about the classes{accuracy}."


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    about = "Train a small CLIP from labeled images: an image's captions are sentences about its class."
    trainer = make_trainer(ArgumentParser(GROUPS, PROG, about).parse(argv), argv)
    trainer.train()
    trainer.say_result("accuracy")
    return 0


def make_trainer(groups: tuple, argv: list[str] | None) -> ContrastiveTrainer:
    """Return the trainer for the options of the command; `argv` are its arguments, for the card."""
    clip, data, optimization, run = groups
    start_run(run, PROG, argv, list(groups))
    say_license(run)
    # What is said about them is made of their labels.
    train, evaluation, test = load_splits(data, learns_labels=True)
    names = class_names(train)
    # `(classes, sentences)` texts and their tokens `(classes, sentences, length)`.
    texts = [[sentence.format(name) for sentence in clip.sentences] for name in names]
    tokenizer = word_tokenizer([text for row in texts for text in row])
    inputs = tokenizer([text for row in texts for text in row], padding=True, return_tensors="pt")["input_ids"]
    tokens = inputs.view(len(names), len(clip.sentences), -1)
    model = build_clip(clip, tokenizer, tokens.shape[-1])
    if run.compile:
        model.compile()
    size = {"height": model.config.vision_config.image_size, "width": model.config.vision_config.image_size}
    processor = CLIPProcessor(CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False), tokenizer)
    args = training_arguments(ContrastiveArguments, run, data, optimization)
    return ContrastiveTrainer(model, args, tokens, processor, train, evaluation, test, run=run, data=data)


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words of the texts, which marks beginning and end as CLIP's does."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<start>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("<start>", "<end>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<start>",
        eos_token="<end>",
    )


def build_clip(arguments: ClipArguments, tokenizer: PreTrainedTokenizerFast, length: int) -> CLIPModel:
    """Return a new CLIP for the tokenizer's words. Texts may have twice as many tokens as the longest sentence, of
    `length` tokens."""
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2 * length,
        "pad_token_id": tokenizer.pad_token_id,
        **ends,
        **read_values("text", arguments.text),
    }
    tokenizer.model_max_length = text["max_position_embeddings"]
    vision = read_values("vision", arguments.vision)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=arguments.projection_dim))


@torch.inference_mode()
def evaluate_zero_shot(accelerator: Accelerator, model, tokens: torch.Tensor, loader) -> dict[str, float]:
    """Measure the `accuracy` of comparing images with the mean embedding of each class's sentences."""
    model.eval()
    clip, accuracy = accelerator.unwrap_model(model), TopKAccuracy()
    sentences = F.normalize(clip.get_text_features(tokens.flatten(0, 1)).pooler_output.float(), dim=-1)
    classifier = sentences.unflatten(0, tokens.shape[:2]).mean(1)
    for batch in loader:
        scores = clip.get_image_features(batch["pixel_values"]).pooler_output.float() @ classifier.mT
        scores, labels = accelerator.gather_for_metrics((scores, batch["labels"]))
        accuracy.add_batch(predictions=scores.cpu().numpy(), references=labels.cpu().numpy())
    return accuracy.compute()


if __name__ == "__main__":
    run_as_program(main, PROG)
