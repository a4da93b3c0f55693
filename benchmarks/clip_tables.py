"""A small CLIP, and a tiny LLaVA on it, before and after a SparseFormer takes the place of their image side.

    python benchmarks/clip_tables.py clip     # table 6's question: zero-shot accuracy and retrieval
    python benchmarks/clip_tables.py llava    # table 7's: answers before the swap, after it, after more bootstrapping

Both train the CLIP first: images of CIFAR-10 and sentences about their classes. SparseFormers are bootstrapped from
its image side with images alone. The language model is trained on questions about the images and never again. Runs are
kept under --runs-dir and found again, so that a killed command goes on, and seeds can be run side by side before all
of them are put together. Writes clip_TABLE.json.
"""

import argparse
import statistics
from pathlib import Path

import datasets
import torch
from transformers import (
    AutoProcessor,
    CLIPModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Trainer,
    TrainingArguments,
    set_seed,
)

from frugalvit import SparseFormerVisionModelWithProjection, count_macs, matching_processor, swap_vision_tower
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import class_names, default_split, load_images
from frugalvit.common.files import whole_folder
from frugalvit.common.tables import format_table
from frugalvit.evaluation.images import image_batches
from frugalvit.evaluation.retrieval import embed_all_images, retrieval_recall
from frugalvit.evaluation.two_towers import embed_all_texts, load_two_towers
from frugalvit.evaluation.zero_shot import zero_shot_accuracy, zero_shot_classifier
from frugalvit.modeling.modeling_sparseformer_llava import check_image_tokens
from frugalvit.training import bootstrap, contrastive
from frugalvit.training.contrastive import word_tokenizer
from shared import (
    STUDENT,
    add_data_arguments,
    add_run_arguments,
    data_arguments,
    folder_name,
    run_recipe,
    spread,
    write_table,
)


VISION = "image_size=32,patch_size=4,hidden_size=128,intermediate_size=512,num_hidden_layers=6,num_attention_heads=4"
TEXT = "hidden_size=128,intermediate_size=512,num_hidden_layers=2,num_attention_heads=4"
LANGUAGE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
VEHICLES = {"airplane", "automobile", "ship", "truck"}
# Questions, and what answers them given the name of the class.
QUESTIONS = {
    "what is this ?": lambda name: name,
    "is this an animal or a vehicle ?": lambda name: "vehicle" if name in VEHICLES else "animal",
}
# Rows of both tables: latent tokens, and what bootstrapping adds. 64 patches and [CLS] are the CLIP's.
STUDENTS = {
    "SparseFormer, 16 tokens": (15, []),
    "SparseFormer, 32 tokens": (31, []),
    "SparseFormer, 16 tokens, aligned": (15, ["--token-loss-weight", "4"]),  # ours
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["clip", "llava"])
    add_data_arguments(parser)
    parser.add_argument("--images", type=int, default=8000, help="training images (default: %(default)s)")
    parser.add_argument("--test-images", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--clip-epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="of bootstrapping (default: %(default)s)")
    parser.add_argument("--llava-steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--continued-steps", type=int, default=1000, help="default: %(default)s")
    add_run_arguments(parser, "runs/clip_tables")
    arguments = parser.parse_args()

    measure = {"clip": measure_clips, "llava": measure_llavas}[arguments.table]
    by_seed = [measure(arguments, seed) for seed in arguments.seeds]
    rows = []
    for name in by_seed[0]:
        row = {"row": name}
        for number, value in by_seed[0][name].items():
            values = [measured[name][number] for measured in by_seed]
            row[number] = value if isinstance(value, int) else statistics.mean(values)
            if not isinstance(value, int):
                row[f"{number} spread"] = spread(values)
        rows.append(row)
    print(format_table(rows))
    settings = ("images", "test_images", "clip_epochs", "epochs", "seeds")
    settings += ("llava_steps", "continued_steps") if arguments.table == "llava" else ()
    write_table(
        arguments.results_dir / f"clip_{arguments.table}.json",
        {name: getattr(arguments, name) for name in settings},
        rows,
    )


def shared_arguments(arguments, seed: int) -> list[str]:
    """What every recipe's command line says."""
    return [
        *(*data_arguments(arguments), "--train-split", f"train[:{arguments.images}]"),
        *("--eval-split", test_split(arguments), "--mixed-precision", "no", "--seed", str(seed)),
    ]


def test_split(arguments) -> str:
    return f"{default_split(arguments.eval_dataset)}[:{arguments.test_images}]"


def test_images(arguments) -> datasets.Dataset:
    dataset = arguments.eval_dataset or arguments.dataset
    return load_images(dataset, test_split(arguments), class_names=arguments.class_names)


def train_clip(arguments, seed: int) -> Path:
    """The folder of a CLIP, trained now or before."""
    folder = arguments.runs_dir / folder_name("clip", seed)
    run_recipe(
        contrastive,
        folder,
        [
            *(*shared_arguments(arguments, seed), "--vision", VISION, "--text", TEXT, "--projection-dim", "128"),
            *("--epochs", str(arguments.clip_epochs), "--warmup-epochs", "1", "--batch-size", "128"),
        ],
    )
    return folder


def bootstrap_student(arguments, clip: Path, name: str, seed: int) -> Path:
    """The folder of a SparseFormer, bootstrapped now or before."""
    tokens, extra = STUDENTS[name]
    folder = arguments.runs_dir / folder_name(name, seed)
    run_recipe(
        bootstrap,
        folder,
        [
            *("--teacher", str(clip), *shared_arguments(arguments, seed), "--crop-scale", "0.8", "1"),
            *("--recipe", "paper", "--num-latent-tokens", str(tokens), "--config-overrides", STUDENT),
            *("--epochs", str(arguments.epochs), "--learning-rate", "4e-3", "--batch-size", "64", *extra),
        ],
    )
    return folder


def measure_clips(arguments, seed: int) -> dict[str, dict[str, float | int]]:
    """Zero-shot accuracy and retrieval of the CLIP and with each SparseFormer."""
    clip = train_clip(arguments, seed)
    images = test_images(arguments)
    rows = {"CLIP, 64 tokens": measure_clip(clip, None, images)}
    for name in STUDENTS:
        rows[name] = measure_clip(clip, bootstrap_student(arguments, clip, name, seed), images)
    return rows


def measure_clip(clip: Path, student: Path | None, images: datasets.Dataset) -> dict[str, float | int]:
    towers = load_two_towers(str(clip), student and str(student), "cpu")
    names = class_names(images)
    classifier = zero_shot_classifier(towers, names, contrastive.SENTENCES)
    # Retrieval among ten images, one of each class, and their captions: captions of one class are all alike.
    embeddings = embed_all_images(towers, images, 256, 0)
    captions = embed_all_texts(towers, [f"a photo of a {name} ." for name in names], 64)
    of_class = [[i for i, label in enumerate(images["label"]) if label == wanted] for wanted in range(len(names))]
    groups = list(zip(*of_class, strict=False))
    recalls = [retrieval_recall(embeddings[list(group)], captions, torch.arange(len(names))) for group in groups]
    if student is None:
        vision = CLIPModel.from_pretrained(clip).vision_model
    else:
        vision = SparseFormerVisionModelWithProjection.from_pretrained(student).base_model
    return {
        "zero-shot accuracy": zero_shot_accuracy(towers, classifier, images, batch_size=256)["accuracy"],
        **{
            f"{direction}@1 of 10": statistics.mean(recall[f"{direction}@1"] for recall in recalls)
            for direction in ("image_to_text", "text_to_image")
        },
        "macs_with_attention": count_macs(vision, 32).macs_with_attention,
    }


def measure_llavas(arguments, seed: int) -> dict[str, dict[str, float | int]]:
    """Share of right answers of a LLaVA with CLIP's image side and with SparseFormers in its place."""
    clip = train_clip(arguments, seed)
    folder = train_llava(arguments, clip, seed)
    llava = LlavaForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    images = test_images(arguments)
    rows = {"LLaVA with CLIP, 64 tokens": answer_accuracy(llava, processor, images)}
    for name in STUDENTS:
        student = bootstrap_student(arguments, clip, name, seed)
        rows[name] = swapped_accuracy(folder, student, images)
        more = continue_bootstrapping(arguments, clip, student, name, seed)
        rows[f"{name}, {arguments.continued_steps} more iterations"] = swapped_accuracy(folder, more, images)
    return rows


def train_llava(arguments, clip: Path, seed: int) -> Path:
    """The folder of a LLaVA whose language model and projector were trained on questions, now or before."""
    folder = arguments.runs_dir / folder_name("llava", seed)
    if folder.exists():
        return folder
    set_seed(seed)
    images = load_images(arguments.dataset, f"train[:{arguments.images}]", class_names=arguments.class_names)
    names = class_names(images)
    texts = [f"<image> {question} {answer(name)}" for question, answer in QUESTIONS.items() for name in names]
    tokenizer = word_tokenizer([text.replace("<image>", "") for text in texts])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = CLIPModel.from_pretrained(clip).vision_model
    config = LlavaConfig(
        vision_config=vision.config,
        text_config=LlamaConfig(vocab_size=len(tokenizer), **LANGUAGE, pad_token_id=tokenizer.pad_token_id),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=64,
    )
    llava = LlavaForConditionalGeneration(config)
    llava.model.vision_tower.load_state_dict(vision.state_dict())
    llava.model.vision_tower.requires_grad_(False)
    processor = LlavaProcessor(
        AutoProcessor.from_pretrained(clip).image_processor,
        tokenizer,
        patch_size=4,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    check_image_tokens(processor, llava)

    pixels = torch.cat([pixel_values for pixel_values, _ in image_batches(processor.image_processor, images, 256)])
    labels, questions = images["label"], list(QUESTIONS.items())

    class Questions(torch.utils.data.Dataset):
        """Each image with each question."""

        def __len__(self) -> int:
            return len(questions) * len(pixels)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            image, (question, answer) = index // len(questions), questions[index % len(questions)]
            ids = question_ids(tokenizer, question)
            answer_ids = tokenizer(answer(names[labels[image]]), add_special_tokens=False)["input_ids"]
            return {"ids": ids, "answer": answer_ids, "pixel_values": pixels[image]}

    def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
        length = max(len(example["ids"]) + len(example["answer"]) for example in examples)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for example in examples:
            ids, answer = example["ids"], example["answer"]
            padding = length - len(ids) - len(answer)
            batch["input_ids"].append([tokenizer.pad_token_id] * padding + ids + answer)
            batch["attention_mask"].append([0] * padding + [1] * (length - padding))
            batch["labels"].append([-100] * (length - len(answer)) + answer)
        batch = {name: torch.tensor(rows) for name, rows in batch.items()}
        return batch | {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}

    training = TrainingArguments(
        str(folder.with_name(f"{folder.name}-checkpoints")),
        max_steps=arguments.llava_steps,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        save_strategy="no",
        logging_steps=100,
        report_to="none",
        seed=seed,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    Trainer(llava, training, train_dataset=Questions(), data_collator=collate).train()
    with whole_folder(folder) as aside:
        llava.save_pretrained(aside)
        processor.save_pretrained(aside)
    return folder


def question_ids(tokenizer, question: str, image_tokens: int = 64) -> list[int]:
    """Tokens of a question after those of an image."""
    image = tokenizer.convert_tokens_to_ids("<image>")
    words = tokenizer(question, add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *[image] * image_tokens, *words]


def continue_bootstrapping(arguments, clip: Path, student: Path, name: str, seed: int) -> Path:
    """The folder of a student that was bootstrapped for more iterations, now or before."""
    folder, steps, batch_size = student.with_name(f"{student.name}-more"), arguments.continued_steps, 32
    # An epoch shows no image twice.
    epochs = next(n for n in range(1, steps + 1) if steps % n == 0 and steps // n <= arguments.images // batch_size)
    run_recipe(
        bootstrap,
        folder,
        [
            *("--teacher", str(clip), "--student", str(student), *shared_arguments(arguments, seed)),
            *("--crop-scale", "0.8", "1", "--learning-rate", "1e-3", "--batch-size", str(batch_size)),
            *("--epochs", str(epochs), "--steps-per-epoch", str(steps // epochs), *STUDENTS[name][1]),
        ],
    )
    return folder


def swapped_accuracy(llava_folder: Path, student: Path, images: datasets.Dataset) -> dict[str, float]:
    llava = LlavaForConditionalGeneration.from_pretrained(llava_folder)
    model = swap_vision_tower(llava, SparseFormerVisionModelWithProjection.from_pretrained(student))
    processor = matching_processor(AutoProcessor.from_pretrained(llava_folder), model)
    return answer_accuracy(model, processor, images)


@torch.inference_mode()
def answer_accuracy(llava, processor, images: datasets.Dataset) -> dict[str, float | int]:
    """Share of right answers to each question, the whole answer generated."""
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
