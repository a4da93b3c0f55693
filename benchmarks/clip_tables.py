"""Measure a small CLIP and a tiny LLaVA before and after a SparseFormer replaces their image encoder.

    python benchmarks/clip_tables.py clip     # zero-shot accuracy, retrieval, explained variance of patches
    python benchmarks/clip_tables.py llava    # answers before and after the swap, and after `align-llava`
    python benchmarks/clip_tables.py llava_inherited   # answers with students of `--focusing inherited`

Each command first trains the CLIP on images of CIFAR-10 and sentences about the classes. SparseFormers are
bootstrapped from the CLIP's image encoder without sentences. The LLaVA is trained on questions about the images. After
the swap, `frugalvit align-llava` trains the projector on the original LLaVA's answers. Finished runs under --runs-dir
are reused. The output is clip_TABLE.json.
"""

import copy
import functools
import math
import statistics
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    AutoProcessor,
    CLIPModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Trainer,
    default_data_collator,
    set_seed,
)

import small_clip
from frugalvit import (
    SparseFormerLlavaForConditionalGeneration,
    count_macs,
    match_channels_,
    matching_processor,
    swap_vision_tower,
)
from frugalvit.evaluation.images import image_batches, take_first
from frugalvit.evaluation.retrieval import embed_all_images, retrieval_recall
from frugalvit.evaluation.two_towers import embed_all_texts, load_two_towers
from frugalvit.evaluation.zero_shot import zero_shot_accuracy, zero_shot_classifier
from frugalvit.swap import pixel_pairs
from frugalvit.training import align_llava, bootstrap
from frugalvit.training.data import class_names, default_split, load_images
from frugalvit.training.loading import load_model
from shared import (
    STUDENT,
    add_data_arguments,
    add_run_arguments,
    data_arguments,
    folder_name,
    make_parser,
    run_training,
    spread,
    write_table,
)
from small_clip import SENTENCES, train_and_save, word_tokenizer


LANGUAGE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
# Ridge penalty in `explained_variance`, relative to the mean squared norm of the regression's input columns.
RIDGE = 0.1
# Number of images that `match_channels_` gets. `frugalvit swap --dataset` uses the same number by default.
MATCHED_IMAGES = 1000
VEHICLES = {"airplane", "automobile", "ship", "truck"}
# Questions, and functions from the class name to the right answer.
QUESTIONS = {
    "what is this ?": lambda name: name,
    "is this an animal or a vehicle ?": lambda name: "vehicle" if name in VEHICLES else "animal",
}
# Students by row name: number of latent tokens without [CLS], and additional arguments of `frugalvit bootstrap`.
# `READABLE` trains the tokens to resemble the CLIP's patches, so that a LLaVA can use the tokens.
READABLE = ["--token_loss_weight", "1", "--token_layers", "-2", "--token_distance", "raw"]
STUDENTS = {
    "SparseFormer, 16 tokens": (15, []),
    "SparseFormer, 16 readable tokens": (15, READABLE),
    "SparseFormer, 32 readable tokens": (31, READABLE),
    # Each of the following rows changes one part of `READABLE`.
    "SparseFormer, 16 tokens, normalized": (15, ["--token_loss_weight", "1", "--token_layers", "-2"]),
    "SparseFormer, 16 tokens, all layers": (15, ["--token_loss_weight", "1", "--token_distance", "raw"]),
}
STUDENTS_INHERITED = {
    "SparseFormer, 16 readable tokens of a grid": (16, READABLE),
    "SparseFormer, 16 readable tokens placed by content": (16, [*READABLE, "--placement", "content"]),
}
# Students for which `frugalvit align-llava` runs after the swap.
ALIGNED = list(STUDENTS)[:3]


def main():
    parser = make_parser(__doc__)
    tables = {
        "clip": measure_clips,
        "llava": measure_llavas,
        "llava_inherited": functools.partial(measure_llavas, students=STUDENTS_INHERITED),
    }
    parser.add_argument("table", choices=tables)
    add_data_arguments(parser)
    parser.add_argument("--images", type=int, default=8000, help="training images (default: %(default)s)")
    parser.add_argument("--test-images", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--clip-epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=8, help="of bootstrapping (default: %(default)s)")
    parser.add_argument("--llava-steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--align-epochs", type=int, default=1, help="of align-llava (default: %(default)s)")
    add_run_arguments(parser, "runs/clip_tables")
    arguments = parser.parse_args()

    by_seed = [tables[arguments.table](arguments, seed) for seed in arguments.seeds]
    rows = []
    for name, first in by_seed[0].items():
        row = {"row": name}
        for number, value in first.items():
            values = [measured[name][number] for measured in by_seed]
            of_seeds = {number: statistics.mean(values), f"{number} spread": spread(values)}
            row |= {number: value} if isinstance(value, int) else of_seeds
        rows.append(row)
    settings = ("images", "test_images", "clip_epochs", "epochs", "seeds")
    settings += () if arguments.table == "clip" else ("llava_steps",)
    settings += ("align_epochs",) if arguments.table == "llava" else ()
    write_table(
        arguments.results_dir / f"clip_{arguments.table}.json",
        {name: getattr(arguments, name) for name in settings},
        rows,
    )


def shared_arguments(arguments, seed: int) -> list[str]:
    return [
        *(*data_arguments(arguments), "--train_split", f"train[:{arguments.images}]"),
        *("--eval_split", "none", "--seed", str(seed)),
    ]


def test_images(arguments) -> datasets.Dataset:
    dataset, names = arguments.eval_dataset or arguments.dataset, class_names(train_images(arguments))
    split = f"{default_split(dataset)}[:{arguments.test_images}]"
    return load_images(dataset, split, class_names=arguments.class_names, default_names=names)


def train_images(arguments) -> datasets.Dataset:
    return load_images(arguments.dataset, f"train[:{arguments.images}]", class_names=arguments.class_names)


def train_clip(arguments, seed: int) -> Path:
    folder = arguments.runs_dir / folder_name("clip", seed)
    if not folder.exists():
        small_clip.train_clip(train_images(arguments), folder, arguments.clip_epochs, seed)
    return folder


def bootstrap_student(arguments, clip: Path, name: str, seed: int) -> Path:
    tokens, extra = (STUDENTS | STUDENTS_INHERITED)[name]
    folder = arguments.runs_dir / folder_name(name, seed)
    argv = ["--teacher", str(clip), *shared_arguments(arguments, seed), "--num_tokens", str(tokens), *extra]
    argv += ["--num_train_epochs", str(arguments.epochs), "--per_device_train_batch_size", "64"]
    argv += ["--crop_scale", "0.8", "1"]
    if name in STUDENTS:
        argv += ["--focusing", "paper", "--preset", "paper", "--config_overrides", STUDENT, "--learning_rate", "4e-3"]
        argv += ["--warmup_steps", str(1 / arguments.epochs)]
    run_training(bootstrap, folder, argv)
    return folder


def measure_clips(arguments, seed: int) -> dict[str, dict[str, float | int]]:
    clip = train_clip(arguments, seed)
    images = test_images(arguments)
    rows = {"CLIP, 64 tokens": measure_clip(arguments, clip, None, images)}
    for name in STUDENTS:
        rows[name] = measure_clip(arguments, clip, bootstrap_student(arguments, clip, name, seed), images)
    return rows


def measure_clip(arguments, clip: Path, student: Path | None, images: datasets.Dataset) -> dict[str, float | int]:
    towers = load_two_towers(str(clip), student and str(student), "cpu")
    names = class_names(images)
    classifier = zero_shot_classifier(towers, names, SENTENCES)
    # All images of a class have the same caption, so each retrieval uses one image and one caption of each class.
    embeddings = embed_all_images(towers, images, 256, 0)
    captions = embed_all_texts(towers, [f"a photo of a {name} ." for name in names], 64)
    of_class = [[i for i, label in enumerate(images["label"]) if label == wanted] for wanted in range(len(names))]
    groups = list(zip(*of_class, strict=False))
    recalls = [retrieval_recall(embeddings[list(group)], captions, torch.arange(len(names))) for group in groups]
    if student is None:
        vision = CLIPModel.from_pretrained(clip).vision_model
    else:
        vision = AutoModel.from_pretrained(student).base_model
    return {
        "zero-shot accuracy": zero_shot_accuracy(towers, classifier, images, batch_size=256)["accuracy"],
        **{
            f"{direction}@1 of 10": statistics.mean(recall[f"{direction}@1"] / 100 for recall in recalls)
            for direction in ("image_to_text", "text_to_image")
        },
        "patches told": explained_variance(arguments, clip, student),
        "macs_with_attention": count_macs(vision, 32).macs_with_attention,
    }


@torch.no_grad()
def explained_variance(arguments, clip: Path, student: Path | None) -> float:
    """Predict the CLIP's patch states from the student's tokens by ridge regression. Return the fraction of variance
    that is explained on test images. Patch states and tokens are from the layer whose output a LLaVA uses."""
    teacher = CLIPModel.from_pretrained(clip).vision_model.eval()
    if student is None:
        return 1.0
    model = AutoModel.from_pretrained(student).base_model.eval()
    processor = AutoProcessor.from_pretrained(clip).image_processor

    def states(images: datasets.Dataset) -> list[torch.Tensor]:
        found = [], []
        for pixel_values, _ in image_batches(processor, images, 256):
            for rows, tower in zip(found, (model, teacher), strict=True):
                rows.append(tower(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:].flatten(1))
        return [torch.cat(rows).double() for rows in found]

    tokens, patches = states(train_images(arguments))
    centers = tokens.mean(0), patches.mean(0)
    tokens, patches = tokens - centers[0], patches - centers[1]
    ridge = RIDGE * tokens.square().sum(0).mean() * torch.eye(tokens.shape[1], dtype=tokens.dtype)
    weight = torch.linalg.solve(tokens.mT @ tokens + ridge, tokens.mT @ patches)
    tokens, patches = (rows - center for rows, center in zip(states(test_images(arguments)), centers, strict=True))
    return (1 - (patches - tokens @ weight).square().sum() / patches.square().sum()).item()


def measure_llavas(arguments, seed: int, students=STUDENTS) -> dict[str, dict[str, float | int]]:
    """Measure the answers of a LLaVA with the CLIP's image encoder, and with each SparseFormer as image encoder."""
    clip = train_clip(arguments, seed)
    folder = train_llava(arguments, clip, seed)
    llava = LlavaForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    images, match_on = test_images(arguments), take_first(train_images(arguments), MATCHED_IMAGES)
    rows = {"LLaVA with CLIP, 64 tokens": answer_accuracy(llava, processor, images)}
    if students is STUDENTS_INHERITED:
        rows["LLaVA with CLIP, 16 means of four patches"] = answer_accuracy(with_means(llava), processor, images)
    for name in students:
        student = bootstrap_student(arguments, clip, name, seed)
        rows[f"{name}, swapped"] = swapped_accuracy(folder, student, images)
        rows[f"{name}, swapped, channels matched"] = swapped_accuracy(folder, student, images, match_on)
        if name in ALIGNED:
            aligned = align(arguments, folder, student, f"{name}, own answers", seed)
            model = SparseFormerLlavaForConditionalGeneration.from_pretrained(aligned)
            rows[f"{name}, own answers"] = answer_accuracy(model, AutoProcessor.from_pretrained(aligned), images)
    return rows


def with_means(llava: LlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """Return a copy of a LLaVA that averages 2 x 2 patches before the projector, for comparison with students."""

    def average(projector, arguments):
        (patches,) = arguments
        side = math.isqrt(patches.shape[1])
        return (F.avg_pool2d(patches.mT.unflatten(2, (side, side)), 2).flatten(2).mT,)

    llava = copy.deepcopy(llava)
    llava.model.multi_modal_projector.register_forward_pre_hook(average)
    llava.config.image_seq_length //= 4
    return llava


def train_llava(arguments, clip: Path, seed: int) -> Path:
    """Train the language model and the projector of a LLaVA on `QUESTIONS`, or reuse the run. Return the folder."""
    folder = arguments.runs_dir / folder_name("llava", seed)
    if folder.exists():
        return folder
    set_seed(seed)
    images = train_images(arguments)
    names = class_names(images)
    texts = [f"<image> {question} {answer(name)}" for question, answer in QUESTIONS.items() for name in names]
    tokenizer = word_tokenizer([text.replace("<image>", "") for text in texts])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    language = LlamaConfig(vocab_size=len(tokenizer), **LANGUAGE, pad_token_id=tokenizer.pad_token_id)
    image_processor = AutoProcessor.from_pretrained(clip).image_processor
    llava, processor = make_llava(CLIPModel.from_pretrained(clip).vision_model, language, image_processor, tokenizer)
    train_answers(llava, processor, images, folder, arguments.llava_steps, seed)
    return folder


def make_llava(tower, language: LlamaConfig, image_processor, tokenizer):
    """Return a LLaVA with a frozen vision tower and a new language model, and a processor for the LLaVA."""
    vision = tower.config
    config = LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
    )
    llava = LlavaForConditionalGeneration(config)
    # `strict=False`, because the tower of a classifier has no pooler. A LLaVA does not use the pooler.
    llava.model.vision_tower.load_state_dict(tower.state_dict(), strict=False)
    llava.model.vision_tower.requires_grad_(False)
    processor = LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=vision.patch_size,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    return llava, processor


def train_answers(
    llava: LlavaForConditionalGeneration, processor, images: datasets.Dataset, folder: Path, steps: int, seed: int
):
    """Train a LLaVA to answer `QUESTIONS`, and save the LLaVA and its processor. Frozen weights are not trained."""
    tokenizer, names = processor.tokenizer, class_names(images)
    pixels = torch.cat([pixel_values for pixel_values, _ in image_batches(processor.image_processor, images, 256)])
    examples = [
        (question_ids(tokenizer, question), tokenizer(answer(name), add_special_tokens=False)["input_ids"])
        for name in names
        for question, answer in QUESTIONS.items()
    ]
    length, padded = max(len(ids) + len(answer) for ids, answer in examples), []
    for ids, answer in examples:
        padding = length - len(ids) - len(answer)
        padded.append(
            {
                "input_ids": [tokenizer.pad_token_id] * padding + ids + answer,
                "attention_mask": [0] * padding + [1] * (length - padding),
                "labels": [-100] * (length - len(answer)) + answer,
            }
        )
    labels = images["label"]

    class Questions(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(QUESTIONS) * len(pixels)

        def __getitem__(self, index: int) -> dict:
            image, question = divmod(index, len(QUESTIONS))
            return padded[len(QUESTIONS) * labels[image] + question] | {"pixel_values": pixels[image]}

    trainer = functools.partial(Trainer, data_collator=default_data_collator)
    budget = {"max_steps": steps, "per_device_train_batch_size": 32, "warmup_steps": steps // 10}
    train_and_save(trainer, llava, processor, Questions(), folder, seed=seed, logging_steps=100, **budget)


def question_ids(tokenizer, question: str, image_tokens: int = 64) -> list[int]:
    image = tokenizer.convert_tokens_to_ids("<image>")
    words = tokenizer(question, add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *[image] * image_tokens, *words]


def align(arguments, llava: Path, student: Path, name: str, seed: int) -> Path:
    folder = arguments.runs_dir / folder_name(name, seed)
    argv = ["--model", str(llava), "--vision_model", str(student), *shared_arguments(arguments, seed)]
    argv += ["--prompt", "{image} {question}", "--questions", *QUESTIONS, "--answer_tokens", "1"]
    argv += ["--num_train_epochs", str(arguments.align_epochs)]
    run_training(align_llava, folder, argv)
    return folder


def swapped_accuracy(
    llava_folder: Path, student: Path, images: datasets.Dataset, match_on: datasets.Dataset | None = None
) -> dict[str, float | int]:
    """Measure a LLaVA's answers to `images` after the swap. If `match_on` is given, `match_channels_` is
    called with the images in `match_on` before the measurement."""
    llava, old_processor = load_model(llava_folder, "image-text-to-text", "cpu")
    tower, _ = load_model(student, "image-feature-extraction", "cpu")
    model = swap_vision_tower(llava, tower)
    processor = matching_processor(old_processor, model)
    if match_on is not None:
        match_channels_(model, llava, pixel_pairs(processor, old_processor, match_on))
    return answer_accuracy(model, processor, images)


@torch.inference_mode()
def answer_accuracy(llava, processor, images: datasets.Dataset) -> dict[str, float | int]:
    """Return the share of right answers to each of `QUESTIONS`, and the number of image tokens."""
    llava.eval()
    names, tokenizer = class_names(images), processor.tokenizer
    tokens = llava.config.image_seq_length
    right = {question: [] for question in QUESTIONS}
    for pixel_values, indices in image_batches(processor.image_processor, images, 128):
        for question, answer in QUESTIONS.items():
            ids = torch.tensor([question_ids(tokenizer, question, tokens)] * len(indices))
            generated = llava.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixel_values,
                max_new_tokens=1,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            expected = [answer(names[label]) for label in images[indices]["label"]]
            given = tokenizer.batch_decode(generated[:, -1:])
            right[question] += [text == wanted for text, wanted in zip(given, expected, strict=True)]
    return {
        "what is this": statistics.mean(right["what is this ?"]),
        "animal or vehicle": statistics.mean(right["is this an animal or a vehicle ?"]),
        "image tokens": tokens,
    }


if __name__ == "__main__":
    main()
