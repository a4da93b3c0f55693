"""A ViT that learns beside an agent CNN, on CIFAR-10: one command a table.

    python benchmarks/agent_tables.py joint   # ViT and agent alone, joint, shared, joint from impulses
    python benchmarks/agent_tables.py hints   # joint, with the hint removed at a relative depth (figure 1)
    python benchmarks/agent_tables.py agents  # a res-like agent, Agent-B, and SAM instead of an agent
    python benchmarks/agent_tables.py longer  # ViT alone, the control, joint with and without hints, 40 epochs
    python benchmarks/agent_tables.py directions  # less of the hints and of SAM, which cost accuracy here
    python benchmarks/agent_tables.py gradients   # lengths of each term's gradient for the joint ViT, and their angles

Every row has the same architectures (64 tokens and [CLS], width 72, 4 blocks, 9 heads or positions), budget (4,000
images, 6 epochs, batches of 32) and the reference implementation's optimizer, start and weights of the losses, unless
its name says otherwise. "joint, no hint, no divergence" is the control: two models that train side by side and tell
each other nothing, with the dropouts of the joint ones; a ViT alone has Transformers' places. From impulses, the rest
starts as Transformers has it, as positions would drown in standard normal patch projections. Images are padded by
reflection. Accuracy is that of the last epoch. Runs are kept under --runs-dir and found again, so that a killed
command goes on, and seeds can be run side by side. Writes agent_TABLE.json. The paper's sizes and budgets are those of
`frugalvit joint --config joint-small` and of the recipes beside it.
"""

import itertools
import statistics
from pathlib import Path

import torch
from transformers import ViTImageProcessor

from frugalvit import BootstrappedViTForImageClassification
from frugalvit.training import joint, train
from frugalvit.training.arguments import run_as_program
from frugalvit.training.data import class_names, load_images
from frugalvit.training.decoding import decode_image
from shared import budget_settings, last_accuracies, parse_table, run_row, spread, wanted_rows, write_table


BLOCKS = 4
SIZES = f"patch_size=4,hidden_size=72,num_hidden_layers={BLOCKS},intermediate_size=288"
VIT = f"image_size=32,{SIZES},num_attention_heads=9"
AGENT = f"{SIZES},num_positions=9"
IMPULSE = {"initialization": "impulse", "initialization_options": "value_init=mimetic"}
TRANSFORMERS = {"initialization": "default"}
# The training of one alone sees the images as the joint one does, without mixing and smoothing.
ALONE = {
    "weight_decay": 0.05,
    "randaugment_layers": 0,
    "mixup": 0,
    "label_smoothing_factor": 0,
    "crop_size": 32,
    "max_grad_norm": 0,
    "initialization": "reference",
}
VIT_ALONE = ALONE | {
    "model_type": "vit",
    "config_overrides": f"{VIT},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1,layer_norm_eps=1e-5",
}
AGENT_ALONE = ALONE | {"model_type": "agent_cnn", "config_overrides": f"image_size=32,{AGENT},branch_dropout=0"}
# Not clipped: the reference's configuration says 1, which its code never reads.
SAM = {"sam_rho": 0.1}
PAIR = {"vit": VIT, "agent": AGENT, "padding_mode": "reflect"}
JOINT, SHARED = (PAIR | {"variant": f"{name}-small"} for name in ("joint", "shared"))
NO_HINT = {"config_overrides": "hint_weight=0"}
CONTROL = {"config_overrides": "hint_weight=0,divergence_weight=0"}
# Rows: name -> training and its arguments. Rows of one name are one run.
TABLES = {
    "joint": {
        "ViT alone": (train, VIT_ALONE),
        "ViT alone, clipped at 0.1": (train, VIT_ALONE | {"max_grad_norm": 0.1}),
        "ViT alone, Transformers' start": (train, VIT_ALONE | TRANSFORMERS),
        "ViT alone, impulse": (train, VIT_ALONE | IMPULSE),
        "agent alone": (train, AGENT_ALONE),
        "joint, no hint, no divergence": (joint, JOINT | CONTROL),
        "joint": (joint, JOINT),
        "joint, clipped at 0.1": (joint, JOINT | {"vit_max_grad_norm": 0.1}),
        "joint, no hint": (joint, JOINT | NO_HINT),
        "joint, Transformers' start": (joint, JOINT | TRANSFORMERS),
        "shared": (joint, SHARED),
        "shared, no hint": (joint, SHARED | NO_HINT),
        "joint, impulse, no hint": (joint, JOINT | IMPULSE | NO_HINT),
    },
    "hints": {
        "joint": (joint, JOINT),
        **{
            f"joint, no hint at depth {block / BLOCKS:g}": (joint, JOINT | {"without_hint_at": block / BLOCKS})
            for block in range(1, BLOCKS + 1)
        },
        "joint, no hint": (joint, JOINT | NO_HINT),
    },
    "agents": {
        "joint": (joint, JOINT),
        # Maps of 4 x 4 after the stem, 2 x 2 after the first block.
        "joint, res-like agent": (joint, JOINT | {"agent": f"{AGENT},stem=res,downsample_after=[0]"}),
        "joint, Agent-B": (joint, JOINT | {"agent": f"{SIZES},num_positions=6,norm_position=after"}),
        "ViT alone": (train, VIT_ALONE),
        "ViT alone, SAM": (train, VIT_ALONE | SAM),
    },
    # Why hints cost accuracy in few epochs, and SAM, too: less of both.
    "directions": {
        "joint, no hint": (joint, JOINT | NO_HINT),
        **{f"joint, hints of weight {w}": (joint, JOINT | {"config_overrides": f"hint_weight={w}"}) for w in (0.1, 1)},
        **{f"ViT alone, SAM of {rho}": (train, VIT_ALONE | SAM | {"sam_rho": rho}) for rho in (0.01, 0.05)},
    },
    "longer": {
        "ViT alone": (train, VIT_ALONE),
        "joint, no hint, no divergence": (joint, JOINT | CONTROL),
        "joint, no hint": (joint, JOINT | NO_HINT),
        "joint": (joint, JOINT),
    },
}
# Rows of "gradients": after training, and before it from each start of `--initialization`.
STARTS = {"fresh, Transformers' start": "default", "fresh, reference's start": "reference"}
GRADIENTS = ("trained", *STARTS)


def main():
    arguments = parse_table(__doc__, [*TABLES, "gradients"], 4000, "runs/agent_tables")
    file, rows = arguments.results_dir / f"agent_{arguments.table}.json", []
    table = TABLES.get(arguments.table, GRADIENTS)
    names = wanted_rows(arguments, table)
    if arguments.table == "gradients":
        write_table(file, budget_settings(arguments), gradients(arguments, names))
        return

    for name in names:
        results = [run(arguments, name, *table[name], seed)[1] for seed in arguments.seeds]
        row = {"row": name, **last_accuracies(results)}
        if "eval_agent_accuracy" in results[0]:
            values = [result["eval_agent_accuracy"] for result in results]
            row |= {"agent": statistics.mean(values), "agent_spread": spread(values), "agent_accuracies": values}
        rows.append(row)
        write_table(file, budget_settings(arguments), rows)


def run(arguments, name: str, recipe, row: dict, seed: int) -> tuple[Path, dict]:
    return run_row(arguments, recipe, name, seed, {"per_device_train_batch_size": 32} | row)


def gradients(arguments, names: list[str]) -> list[dict]:
    """Length of each term's gradient for the ViT of the row "joint", with all of the term's weight, over 512 training
    images, the cosine between that of the hints and that of the other terms, and the rms of tokens before the first
    block."""
    images = load_images(arguments.dataset, "train[:512]")
    labels = torch.tensor(images["label"][:])
    decoded = [decode_image(record["image"], index) for index, record in enumerate(images)]
    image_processor = ViTImageProcessor(size={"height": 32, "width": 32})
    inputs = {"pixel_values": image_processor(decoded, return_tensors="pt")["pixel_values"], "labels": labels}
    measured = {}
    for seed, name in itertools.product(arguments.seeds, names):
        if name == "trained":
            folder, _ = run(arguments, "joint", *TABLES["joint"]["joint"], seed)
            model = BootstrappedViTForImageClassification.from_pretrained(folder)
        else:
            torch.manual_seed(seed)
            pair = joint.TwinArguments(JOINT["variant"], VIT, AGENT, initialization=STARTS[name])
            model = joint.build_twins(pair, class_names(images))
        measured.setdefault(name, []).append(pulls(model, inputs))
    return [
        {"ViT": name}
        | {column: statistics.mean(each[column] for each in values) for column in values[0]}
        | {f"{column}_values": [each[column] for each in values] for column in values[0]}
        for name, values in measured.items()
    ]


def pulls(model: BootstrappedViTForImageClassification, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Lengths of the terms' gradients, the cosine between that of the hints and that of the others, and the rms of the
    tokens."""
    outputs = model.eval()(**inputs, output_hidden_states=True)
    losses, parameters = outputs.losses, list(model.vit.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    vectors = {name: gradient(losses[name].sum()) for name in ("classification", "divergence", "hints")}
    others = vectors["classification"] + vectors["divergence"]
    lengths = {name: vector.norm().item() for name, vector in vectors.items()}
    return lengths | {
        "hints_by_classification": lengths["hints"] / lengths["classification"],
        "cosine_of_hints": torch.cosine_similarity(vectors["hints"], others, dim=0).item(),
        "rms_of_tokens": outputs.hidden_states[0].detach().square().mean().sqrt().item(),
    }


if __name__ == "__main__":
    run_as_program(main, "agent_tables.py")
