"""Test that the hub accepts the metadata of model cards, and that model cards contain no local paths."""

from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from trainings import TINY_STUDENT, logged, run_command

from drawn import draw_classes
from frugalvit import BootstrapArguments, publish
from frugalvit.training.arguments import DataArguments
from frugalvit.training.cards import portable_command, write_card
from tiny import make_vit


def test_published_files_name_nothing_of_this_machine(teacher, imported_once, tmp_path, capsys):
    """The training command contains local paths. The published files must not contain these paths."""
    images = tmp_path / "my photographs"
    for start, (part, count) in enumerate({"train": 6, "val": 2, "test": 3}.items()):
        draw_classes(images / part, count, ("a", "b"), 20 * start)
    options = {"teacher": teacher, "dataset": images, "license": "mit", "train_split": None, "eval_split": None}
    own = run_command("bootstrap", tmp_path / "out", focusing="paper", config_overrides=TINY_STUDENT, **options)
    # The best step is chosen on the validation images. The card reports this step's alignment on the test images.
    card, alignments = ModelCard.load(tmp_path / "out" / "README.md"), logged(own, "eval_alignment")
    [measured], step = logged(own, "test_alignment"), 1 + alignments.index(max(alignments))
    chosen = f"step {step} of 2, chosen on validation (4 images), measured on test (6 images)"
    printed = capsys.readouterr().out
    assert chosen in card.text and f"\nSaved in {tmp_path / 'out'}: {chosen}.\n" in printed
    assert f"cosine with the teacher's embeddings {measured:.4f}." in card.text
    assert f"embeddings {measured:.4f}." in printed
    assert (card.data.license, card.data.eval_results, card.data.datasets) == ("mit", None, None)
    assert f"--teacher {teacher.name} --dataset path/to/images" in card.text and "--output_dir out" in card.text
    publish.main([str(tmp_path / "out"), "--output", str(tmp_path / "published")])
    for file in (tmp_path / "published").iterdir():
        content = file.read_bytes()
        assert not [each for each in (str(tmp_path), "my photographs", str(teacher)) if each.encode() in content]


@pytest.mark.parametrize(
    "base_model, hub_id",
    [
        ("owner/name@main", "owner/name"),
        ("open_clip:hf-hub:owner/name", "owner/name"),
        ("open_clip:ViT-B-16:openai", None),
        ("cifar10-vit", None),
        (None, None),
    ],
)
def test_a_student_names_its_teacher_and_data(base_model, hub_id, tmp_path):
    """The metadata names the teacher and data sets only by hub ids, because the hub refuses other names."""
    data_args = DataArguments(dataset=["cifar10-subset"], eval_dataset=["owner/images", "/data/photographs"])
    args = BootstrapArguments(output_dir="student", use_cpu=True)
    trainer = SimpleNamespace(
        args=args,
        data_args=data_args,
        base_model=base_model,
        base_model_relation="distill",
        usage=None,
        kept_step=2,
        state=SimpleNamespace(max_steps=2),
        eval_dataset=None,
        measured_dataset=None,
    )
    write_card(tmp_path, make_vit(), "A student.", {"alignment": 0.91}, trainer)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.base_model, data.get("base_model_relation")) == (hub_id, hub_id and "distill")
    assert data.library_name == "transformers" and data.datasets == ["uoft-cs/cifar10"]
    [result] = data.eval_results
    assert (result.dataset_type, result.dataset_name, result.metric_value) == ("owner/images", "owner/images", 0.91)


@pytest.mark.parametrize(
    ("given", "portable"),
    [
        ("--dataset /data/a /data/b --output /data/runs/out", "--dataset path/to/images path/to/images --output out"),
        ("--dataset=/data/a", "--dataset=path/to/images"),
        ("--teacher open_clip:local-dir:/models/clip", "--teacher open_clip:local-dir:clip"),
        ("--teacher ~/models/vit --config ../c.yaml", "--teacher vit --config c.yaml"),
        ("--prompt 'USER: {image}\n{question} yes/no'", "--prompt 'USER: {image}\n{question} yes/no'"),
    ],
)
def test_commands_that_others_can_give(given, portable):
    assert portable_command(f"frugalvit train {given}", ["/data/a", "/data/b"]) == f"frugalvit train {portable}"
