"""Train a small CLIP from labeled images: an image's captions are sentences about its class.

    accelerate launch -m frugalvit.training.contrastive --output OUT --vision hidden_size=192,… --text …

Images and sentences of one class are each other's positives (Yang et al. 2022, UniCL): of two images of a class in a
batch, neither is a wrong match of the other's sentence. Several processes compare images with their own share of the
batch. The tokenizer knows the words of the sentences.
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

from ..common.data import class_names, load_splits
from ..common.metrics import TopKAccuracy
from ..common.views import CAPTION, EvalView, ImageFormat, random_seed
from .components.arguments import (
    run_as_program,
)
from .components.augmentation import SmallDataView
from .components.cards import choice_of_epoch, count_measured, name_images, say_license, write_card
from .components.checkpoints import TrainingState
from .components.loaders import make_loaders
from .components.loop import fit
from .components.models import read_values
from .components.optimizers import optimizer_with_schedule
from .components.runs import start_accelerator
from .components.sharding import prepare
from .options.contrastive import PROG, ClipArguments, parse


def main(argv: list[str] | None = None) -> int:
    """Run the recipe with a command line's arguments."""
    arguments = parse(argv)
    clip, data, optimization, run = arguments
    accelerator = start_accelerator(run, PROG, argv, list(arguments))
    say_license(accelerator, run)

    # What is said about them is made of their labels.
    train_images, eval_images, test_images = load_splits(data, learns_labels=True)
    names = class_names(train_images)
    if eval_images is not None and class_names(eval_images) is None:
        raise ValueError("The evaluation images have no labels; choose others with --eval-dataset or --eval-split.")
    # `(classes, sentences)` texts and their tokens `(classes, sentences, length)`.
    texts = [[sentence.format(name) for sentence in clip.sentences] for name in names]
    tokenizer = word_tokenizer([text for row in texts for text in row])
    inputs = tokenizer([text for row in texts for text in row], padding=True, return_tensors="pt")["input_ids"]
    tokens = inputs.view(len(names), len(clip.sentences), -1).to(accelerator.device)
    model = build_clip(clip, tokenizer, tokens.shape[-1])
    size = model.config.vision_config.image_size
    image_processor = CLIPImageProcessor(
        size={"height": size, "width": size}, crop_size={"height": size, "width": size}, do_center_crop=False
    )
    image_format = ImageFormat.from_processor(image_processor)

    view, evaluation = SmallDataView(image_format), (eval_images, EvalView(image_format))
    loader, eval_loader, test_loader = make_loaders(
        accelerator, data, run, (train_images, view), evaluation, test_images
    )
    optimizer, scheduler = optimizer_with_schedule(model, optimization, run.epochs, loader.steps_per_epoch)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)

    def compute_loss(model, batch):
        labels = batch["labels"]
        chosen = [
            random_seed(run.seed, epoch, index, CAPTION) % len(clip.sentences)
            for epoch, index in zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True)
        ]
        chosen = torch.tensor(chosen).to(labels.device, non_blocking=True)
        outputs = model(input_ids=tokens[labels, chosen], pixel_values=batch["pixel_values"])
        targets = (labels[:, None] == labels).float()
        targets /= targets.sum(1, keepdim=True)
        logits = outputs.logits_per_image.float()
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.mT, targets)) / 2

    def save(folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        trained = accelerator.unwrap_model(model)
        trained.save_pretrained(folder, state_dict=weights)
        CLIPProcessor(image_processor, tokenizer).save_pretrained(folder)
        accuracy = (
            f": zero-shot accuracy {state.measured['accuracy']:.2%}{count_measured(run)}"
            if eval_loader
            else ", not evaluated"
        )
        summary = f"A CLIP trained on {name_images(data.dataset)} and sentences about the classes{accuracy}."
        write_card(folder, trained, summary, data, run, state)

    state = fit(
        accelerator,
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        compute_loss=compute_loss,
        evaluate=lambda model, loader: evaluate_zero_shot(accelerator, model, tokens, loader),
        eval_loader=eval_loader,
        test_loader=test_loader,
        save=save,
    )
    accuracy = f"Zero-shot accuracy {state.measured['accuracy']:.4f}" if eval_loader else "Not evaluated"
    accelerator.print(f"{accuracy}: {choice_of_epoch(data, run, state)}. See {run.output_dir}.")
    return 0


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, those of the texts, that marks beginning and end as CLIP's does."""
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
    """A new CLIP for these words; texts may have twice as many tokens as the longest sentence."""
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
    """Accuracy of comparing images with the mean embedding of each class's sentences."""
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
