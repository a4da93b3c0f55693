"""Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.

    accelerate launch -m frugalvit.training.align_llava --model LLAVA --vision-model TOWER --dataset IMAGES \\
        --output OUT

The tower takes the place of the LLaVA's own, as in `frugalvit swap`; tower and language model stay as they are. A
PaliGemma is such a LLaVA, too.
Without text, the LLaVA as it was is the teacher: it answers a question about each image, and the new one learns to
give its answers, token by token with its distribution, from projected tokens whose mean is that of the old ones. With
LLaVA's files of conversations (`--dataset FILE.json`), it learns their answers. `--lora-rank` tunes the language
model, too (Hu et al. 2022), which is written with what was learned added to its weights.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType
from PIL import Image
from tqdm import tqdm

from ..common.conversations import (
    NO_ANSWER,
    default_prompt,
    hold_back,
    is_conversations,
    read_conversations,
)
from ..common.data import NO_EVALUATION, load_splits
from ..common.loading import load_llava, load_vision_model
from ..common.names import without_place
from ..common.views import CAPTION, ImageFormat, random_seed
from ..modeling.image_tokens import projected_tokens
from ..modeling.layers import divergence
from ..modeling.swap import input_device, matching_processor, swap_vision_tower
from .components.answers import Answers, answer, select
from .components.arguments import (
    DataArguments,
    RunArguments,
    check,
    run_as_program,
)
from .components.augmentation import BootstrapView, PairedEvalView
from .components.cards import choice_of_epoch, say_license, write_card
from .components.checkpoints import TrainingState
from .components.loaders import make_loaders
from .components.loop import fit
from .components.optimizers import optimizer_with_schedule
from .components.partly_trained import Learner
from .components.runs import start_accelerator
from .components.sharding import prepare
from .options.align_llava import PRECISIONS, PROG, AnswerArguments, parse


# Of the learning rate: weights of the language model are moved less than those of the projector (LLaVA 1.5 takes 2e-4
# beside 1e-3).
LORA_RATE = 0.2
# Code in the model card.
USE = """

inputs = processor(images=image, text={prompt!r}, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=20)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def main(argv: list[str] | None = None) -> int:
    """Run the recipe with a command line's arguments."""
    arguments = parse(argv)
    parts, asking, data, optimization, run = arguments
    choose_precision(parts.dtype, run)
    accelerator = start_accelerator(run, PROG, argv, list(arguments))
    say_license(accelerator, run, parts.model)
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError("What learns is small and the rest stays as it is: leave FSDP and DeepSpeed out.")
    single = accelerator.num_processes == 1
    check(parts.device_map, parts.device_map is None or single, "device_map", "none with several processes")

    train, evaluation, test = load_questions(data, asking, run.seed)
    dtype = getattr(torch, parts.dtype)
    original, processor = load_llava(parts.model, accelerator.device, dtype, parts.quantize, parts.device_map)
    prompt = default_prompt(processor) if asking.prompt is None else asking.prompt
    tower, _ = load_vision_model(parts.vision_model, "cpu")
    llava = swap_vision_tower(original, tower)
    if parts.num_tokens is not None:
        llava.set_num_tokens(parts.num_tokens)
    new_processor = matching_processor(processor, llava)
    learner = Learner(llava)
    if parts.lora_rank:
        learner.add_lora(parts.lora_rank)

    student_format = ImageFormat.from_processor(new_processor.image_processor)
    learns_from_original = train.conversations is None
    teacher_format = ImageFormat.from_processor(processor.image_processor) if learns_from_original else None
    eval_view = PairedEvalView(student_format, teacher_format)
    view = BootstrapView(student_format, teacher_format, asking.crop_scale, flip=asking.flip)
    loader, eval_loader, test_loader = make_loaders(
        accelerator,
        data,
        run,
        # What is said of a part of an image may be about another one.
        (train.images, view if learns_from_original else eval_view),
        (evaluation.images, eval_view),
        test.images,
    )

    learned = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    in_projector = {*llava.model.multi_modal_projector.parameters()}
    rates = {parameter: 1.0 if parameter in in_projector else LORA_RATE for parameter in learned}
    optimizer, scheduler = optimizer_with_schedule(
        learner, optimization, run.epochs, loader.steps_per_epoch, rates=rates
    )
    accelerator.print(
        f"{llava.config.image_seq_length} tokens an image instead of {count_image_tokens(original, processor)}; "
        f"{sum(parameter.numel() for parameter in learned):,} of "
        f"{sum(parameter.numel() for parameter in learner.parameters()):,} parameters learn."
    )
    model, optimizer, scheduler = prepare(accelerator, learner, optimizer, scheduler)

    def ask(batch: dict, part: Questions) -> Answers:
        """What is to be answered about a batch of images, and what the LLaVA as it was says to that."""
        keys = list(zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True))
        if part.conversations is not None:
            return Answers([part.conversations[index] for _, index in keys])
        chosen = [random_seed(run.seed, *key, CAPTION) % len(asking.questions) for key in keys]
        pixel_values = batch.get("teacher_pixel_values", batch["pixel_values"])
        with accelerator.autocast(), learner.as_it_was():
            return answer(
                *(original, processor, pixel_values.to(dtype), [asking.questions[number] for number in chosen]),
                *(prompt, asking.answer_tokens),
            )

    def read(model, batch: dict, answers: Answers) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """What the new LLaVA says in the place of each token of the answers, the tokens, how many are about each
        image, and the mean of what it reads of each."""
        inputs, labels = answers.inputs(new_processor, llava.config.image_seq_length, prompt)
        inputs = {name: value.to(accelerator.device) for name, value in inputs.items()}
        # Nothing is asked about what stands before the answers; the token before them is asked for the first.
        asked = labels.shape[1] - int((labels != NO_ANSWER).any(0).nonzero()[0])
        outputs = model(pixel_values=batch["pixel_values"].to(dtype), logits_to_keep=asked + 1, **inputs)
        labels = labels[:, -asked:]
        answered = labels != NO_ANSWER
        features = projected_tokens(outputs)
        seen = features.reshape(len(labels), -1, features.shape[-1]).float().mean(1)
        said, tokens = select(outputs.logits[:, :-1], answered).float(), labels[answered].to(accelerator.device)
        # The projector may be on another device than what is returned.
        return said, tokens, answered.sum(1).tolist(), seen.to(accelerator.device)

    def compute_loss(model, batch):
        answers = ask(batch, train)
        said, tokens, _, seen = read(model, batch, answers)
        if answers.logits is None:
            return F.cross_entropy(said, tokens)
        loss = divergence(said, answers.logits, 1.0)
        distance = (seen - answers.seen).square().sum(1) / answers.seen.square().sum(1)
        return loss + asking.feature_loss_weight * distance.mean()

    # What there is to say about each batch of a loader's images, which are the same in every epoch.
    found: dict[object, dict[int, Answers]] = defaultdict(dict)

    @torch.inference_mode()
    def evaluate(model, loader) -> dict[str, float]:
        model.eval()
        shares, known = [], found[loader]
        # Finding the answers takes long.
        progress = tqdm(loader, desc="answers", leave=False, disable=None if accelerator.is_main_process else True)
        for number, batch in enumerate(progress):
            if number not in known:
                # Distributions of all answers would fill the memory.
                known[number] = Answers(ask(batch, evaluation if loader is eval_loader else test).conversations)
            answers = known[number]
            with accelerator.autocast():
                said, tokens, lengths, _ = read(model, batch, answers)
            right = (said.argmax(-1) == tokens).float().split(lengths)
            shares.append(accelerator.gather_for_metrics(torch.stack([values.mean() for values in right])))
        return {"agreement": torch.cat(shares).mean().item()}

    before = None
    if eval_loader:
        before = evaluate(model, test_loader or eval_loader)["agreement"]
        accelerator.print(f"Before: {before:.2%} of the answers' tokens are right.")

    def describe(state: TrainingState) -> str:
        language_model = f" and the language model (LoRA of rank {parts.lora_rank})" if parts.lora_rank else ""
        source = "answers of the LLaVA as it was" if learns_from_original else "conversations"
        text = (
            f"{without_place(parts.model)} with {llava.config.image_seq_length} tokens an image, those of "
            f"{without_place(parts.vision_model)}; the projector{language_model} learned from {source}"
        )
        if before is None:
            return f"{text}, not evaluated."
        return f"{text}: {state.measured['agreement']:.2%} of the answers' tokens are right, {before:.2%} before."

    def save(folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        plain = load_llava(parts.model, "cpu", dtype)[0].model.language_model if parts.quantize else None
        weights = learner.whole_state(plain)
        # Saving takes them out of it.
        num_parameters = sum(weight.numel() for weight in weights.values())
        llava.save_pretrained(folder, state_dict=weights)
        new_processor.save_pretrained(folder)
        # A PaliGemma's processor ends the line itself.
        place = processor.image_token if prompt.endswith("\n") else f"{processor.image_token}\n"
        example = prompt.removesuffix("\n").format(image=place, question=asking.questions[0])
        write_card(
            *(folder, llava, describe(state), data, run, state, parts.model, "agreement"),
            use=USE.format(prompt=example),
            num_parameters=num_parameters,
        )

    state = fit(
        accelerator,
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        compute_loss=compute_loss,
        evaluate=evaluate,
        eval_loader=eval_loader,
        test_loader=test_loader,
        save=save,
        saved=learner,
        metric="agreement",
    )
    accelerator.print(describe(state))
    accelerator.print(f"It is {choice_of_epoch(data, run, state)}. See {run.output_dir}.")
    return 0


def choose_precision(dtype: str, run: RunArguments):
    """Let what learns compute in the precision of the weights that stay as they are."""
    if (needed := PRECISIONS[dtype]) and run.mixed_precision == "auto":
        run.mixed_precision = needed
    fits = needed in (None, run.mixed_precision)
    check(run.mixed_precision, fits, "mixed_precision", f"{needed}, as --dtype is {dtype}")


@dataclass
class Questions:
    """Images to ask about, None for none, and what is said about each, None where the LLaVA as it was is asked."""

    images: object
    conversations: list[list[tuple[str, str]]] | None = None


def load_questions(data: DataArguments, asking: AnswerArguments, seed: int) -> tuple[Questions, Questions, Questions]:
    """What to train, to evaluate and to test on."""
    if not is_conversations(data.dataset):
        return tuple(Questions(images) for images in load_splits(data))
    train = read_conversations(data.dataset[0], asking.image_folder)
    data.evaluated = "all"
    if data.eval_split == NO_EVALUATION:
        data.evaluated = None
        return Questions(*train), Questions(None), Questions(None)
    if data.eval_dataset:
        check(data.eval_dataset, is_conversations(data.eval_dataset), "eval_dataset", "a file of conversations, too")
        evaluation = read_conversations(data.eval_dataset[0], asking.image_folder)
        return Questions(*train), Questions(*evaluation), Questions(None)
    data.evaluated = "a tenth, held back"
    train, held_back = hold_back(*train, seed)
    return Questions(*train), Questions(*held_back), Questions(None)


@torch.no_grad()
def count_image_tokens(llava, processor) -> int:
    """What a LLaVA makes of an image."""
    pixel_values = processor.image_processor(Image.new("RGB", (8, 8)), return_tensors="pt")["pixel_values"]
    pixel_values = pixel_values.to(input_device(llava), llava.dtype)
    return len(llava.get_image_features(pixel_values).pooler_output[0])


if __name__ == "__main__":
    run_as_program(main, PROG)
