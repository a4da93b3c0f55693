"""The files of training/recipes/: each is read by its command and builds what it says, small, and counted in full."""

import itertools
import re
from functools import partial

import pytest
import timm
import torch
import torch.fx.experimental._config as fx_config
import transformers
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, ViTImageProcessor

from frugalvit import (
    BootstrappedViTConfig,
    BootstrappedViTForImageClassification,
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerForSemanticSegmentation,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
from frugalvit.common.loading import load_vision_model
from frugalvit.common.macs import count_macs
from frugalvit.common.splits import load_splits
from frugalvit.common.views import ImageFormat
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training import bootstrap, joint, segment, train
from frugalvit.training.components import classifiers, students
from frugalvit.training.components.arguments import (
    RECIPE_FILES,
    read_recipe,
    recipes_of,
)
from frugalvit.training.components.models import parse_overrides
from frugalvit.training.components.optimizers import optimizer_with_schedule


BOOTSTRAP, SEGMENT, TRAIN, JOINT = (
    recipes_of(f"frugalvit {command}") for command in ("bootstrap", "segment", "train", "joint")
)
# ImageNet-1K's images.
IMAGES = 1_281_167
TINY = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_attention_heads": 4}


def of_timm(name: str, small: bool):
    if not small:
        return timm.create_model(name)
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 4, "mlp_ratio": 1}
    settings = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    config = TimmWrapperConfig(architecture=name.partition(".")[0], model_args=arguments, pretrained_cfg=settings)
    return TimmWrapperForImageClassification(config)


def of_transformers(family: str, model: str, small: bool, **fields):
    config = getattr(transformers, f"{family}Config")(**narrow(fields) if small else fields)
    return getattr(transformers, f"{family}{model}")(config)


def of_two_towers(family: str, small: bool, projection_dim: int | None = None, **fields):
    config_class, model_class = (getattr(transformers, f"{family}{part}") for part in ("Config", "Model"))
    projection = {"projection_dim": projection_dim} if projection_dim else {}
    if not small:
        return model_class(config_class(vision_config=fields, **projection))
    text = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"projection_size": 48, "bos_token_id": 0, "eos_token_id": 1}
    return model_class(config_class(text_config=text, vision_config=narrow(fields), **projection))


def narrow(fields: dict) -> dict:
    """The same number of blocks, for small images."""
    return fields | TINY | ({"intermediate_size": 64} if "intermediate_size" in fields else {})


SMALL = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12}
BASE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24}
DINOV2 = partial(of_transformers, "Dinov2", "Model", patch_size=14, image_size=518)
DINOV3 = partial(of_transformers, "DINOv3ViT", "Model", num_register_tokens=4)
CLIP = partial(of_two_towers, "CLIP")
CLIP_LARGE = partial(CLIP, patch_size=14, projection_dim=768, intermediate_size=4096, **LARGE)
# What the files name, in full and with narrow blocks and few pixels.
TEACHERS = {
    **{
        f"timm/{name}": partial(of_timm, name)
        for name in (
            "vit_base_patch16_224.augreg_in21k_ft_in1k",
            "vit_large_patch16_224.augreg_in21k_ft_in1k",
            "vit_large_patch16_384.augreg_in21k_ft_in1k",
        )
    },
    "openai/clip-vit-base-patch16": partial(CLIP, patch_size=16, projection_dim=512, intermediate_size=3072, **BASE),
    "openai/clip-vit-large-patch14": partial(CLIP_LARGE, image_size=224),
    "openai/clip-vit-large-patch14-336": partial(CLIP_LARGE, image_size=336),
    "facebook/dinov2-small": partial(DINOV2, **SMALL),
    "facebook/dinov2-base": partial(DINOV2, **BASE),
    "facebook/dinov2-large": partial(DINOV2, **LARGE),
    "facebook/dinov3-vits16-pretrain-lvd1689m": partial(DINOV3, intermediate_size=1536, **SMALL),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": partial(DINOV3, intermediate_size=3072, **BASE),
    "google/siglip2-base-patch16-224": partial(of_two_towers, "Siglip", patch_size=16, intermediate_size=3072, **BASE),
}


def read(file) -> tuple[dict, str]:
    """A file's values, and its comment in one line."""
    text = file.read_text(encoding="utf-8")
    comment = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    return read_recipe(file)[1], comment


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Writes the folder of a small model in the place of a hub id, once."""
    folders = {}

    def save(name: str):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("teacher")
            torch.manual_seed(0)
            TEACHERS[name](small=True).save_pretrained(folders[name])
            if not name.startswith("timm/"):
                ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folders[name])
        return folders[name]

    return save


@pytest.fixture(scope="module")
def build(stand_in, tmp_path_factory):
    """Reads and builds a recipe of bootstrapping and those that it goes on from; returns arguments, student and the
    number of the teacher's blocks."""
    built = {}

    def build_recipe(name: str):
        if name in built:
            return built[name]
        values, _ = read(BOOTSTRAP[name])
        argv = ["--config", name, "--teacher", str(stand_in(values["teacher"]))]
        if "student" in values:
            _, earlier, _ = build_recipe(values["student"])
            folder = tmp_path_factory.mktemp("student")
            earlier.save_pretrained(folder)
            argv += ["--student", str(folder)]
        arguments = bootstrap.parse(argv)
        teacher, processor = load_vision_model(arguments[0].teacher, "cpu")
        image_format = ImageFormat.from_processor(processor)
        students.apply_recipe(arguments, image_format.size)
        anatomy = read_anatomy(teacher)
        built[name] = arguments, students.build_student(arguments[0], anatomy, image_format), len(anatomy.blocks)
        return built[name]

    return build_recipe


def test_every_file_belongs_to_a_command():
    names = [*BOOTSTRAP, *SEGMENT, *TRAIN, *JOINT]
    assert sorted(names) == sorted(file.stem for file in RECIPE_FILES.iterdir())
    assert {read(file)[0]["teacher"] for file in BOOTSTRAP.values()} == TEACHERS.keys()
    for name, file in (BOOTSTRAP | SEGMENT).items():
        values, comment = read(file)
        assert values["output_dir"] == name
        # What others go on from lies where its own file puts it.
        assert values.get("student", values.get("model", next(iter(BOOTSTRAP)))) in BOOTSTRAP
        assert ("The paper" in comment) == ("not reproduced here" in comment) != ("No paper says" in comment)


@pytest.mark.parametrize("name", BOOTSTRAP)
def test_bootstrapping(name, build, write_parquet, tmp_path):
    """The student, what is trained of it and the schedule are the file's; ImageNet's splits are found in small."""
    (pair, alignment, data, schedule, run), student, blocks = build(name)
    values, _ = read(BOOTSTRAP[name])
    tokens = values.get("num_latent_tokens") or student.config.num_latent_tokens
    assert student.config.num_latent_tokens == len(student.base_model.latents.initial_rois) == tokens
    assert student.config.image_size in (values.get("image_size"), 32, [32, 32])
    assert (blocks, values["tune"]) in ((12, 4), (24, 8))
    assert len(student.base_model.layers) == blocks - (0 if name.endswith("untruncated") else values["tune"])

    tuned = students.freeze(student, pair, blocks)
    assert tuned == {*student.base_model.layers[: values["tune"]].parameters()}
    steps = IMAGES // run.batch_size
    optimizer, scheduler = students.build_optimizer(student, tuned, schedule, steps, run.epochs)
    assert max(group["initial_lr"] for group in optimizer.param_groups) == values["learning_rate"]
    rate, warmup = scheduler.lr_lambdas[0], round(values["warmup_epochs"] * steps)
    assert rate(warmup) == 1 and rate(values["epochs"] * steps) == pytest.approx(0, abs=1e-9)
    assert (alignment.crop_scale, alignment.token_loss_weight, schedule.repeats) == ([0.5, 1.0], 0, 1)

    for split in ("train", data.eval_split):
        write_parquet(f"{split}-00000.parquet")
    data.dataset = [str(tmp_path)]
    train, evaluation, _ = load_splits(data)
    assert len(train) == len(evaluation) == 12


@pytest.mark.parametrize("name", SEGMENT)
def test_segmentation(name, build, tmp_path):
    values, _ = read(SEGMENT[name])
    _, student, _ = build(values["model"])
    student.save_pretrained(tmp_path)
    argv = ["--config", name, "--model", str(tmp_path)]
    segmenter, data, _, optimization, run = segment.parse(argv)
    model, processor = segment.build_model(segmenter, data)
    assert isinstance(model, SparseFormerForSemanticSegmentation) and data.reduce_labels
    assert (model.config.num_latent_tokens, model.config.num_labels) == (256, 150)
    assert dict(processor.size) == {"height": 512, "width": 512}
    assert model.config.drop_path_rate == values["drop_path"]
    rates = segment.learning_rate_factors(model, optimization.head_multiplier, optimization.layer_decay)
    optimizer, _ = optimizer_with_schedule(model, optimization, 1, 80_000, rates=rates)
    rates = {group["initial_lr"] for group in optimizer.param_groups if group["params"]}
    assert max(rates) == pytest.approx(values["learning_rate"] * values["head_multiplier"])
    assert (len(rates) > 3) == (values["layer_decay"] < 1) and run.batch_size == 32


@pytest.mark.parametrize("name", TRAIN)
def test_training(name):
    values, _ = read(TRAIN[name])
    model, data, recipe, optimization, run = train.parse(["--config", name, "--output", "out"])
    overrides = parse_overrides(model.model_type, model.config_overrides)
    config = transformers.AutoConfig.for_model(model.model_type, **overrides)
    classifiers.set_drop_path(config, recipe.drop_path)
    assert run.batch_size == values["batch_size"] and config.image_size in (32, 224, (224, 224))
    for arguments in (model, data, recipe, optimization, run):
        for field, value in values.items():
            if hasattr(arguments, field):
                assert getattr(arguments, field) == ([value] if field == "dataset" else value), field
    # What the papers train with at 224 pixels.
    if values["dataset"] == "ILSVRC/imagenet-1k":
        assert (recipe.augmentation, recipe.randaugment_magnitude, recipe.erasing) == ("timm", 9, 0.25)
    optimizer, _ = optimizer_with_schedule(torch.nn.Linear(1, 1), optimization, 1, 1)
    assert optimizer.defaults["eps"] == values.get("adam_epsilon", 1e-8)


@pytest.mark.parametrize("name", JOINT)
def test_joint_training(name):
    """Every value is the command's default for that pair, and the reference implementation's clipping."""
    values, _ = read(JOINT[name])
    groups = joint.parse(["--config", name, "--output", "out"])
    defaults = joint.parse(["--output", "out"])
    for arguments, default in zip(groups, defaults, strict=True):
        for field in vars(default):
            if field not in ("dataset", "label_column", "variant", "max_grad_norm"):
                assert getattr(arguments, field) == getattr(default, field), field
    assert (
        groups[-1].max_grad_norm == joint.CLIPPING.get(name, 0) == {"joint-base": 2, "shared-base": 0.1}.get(name, 0)
    )
    assert values["variant"] == name and f"--variant {name}-res" in read(JOINT[name])[1]


# Each trained model of the papers' tables: its file, and the options that make it of that, which the file's comment
# names. Rows without training here (teachers, ToMe, DiffRate, other authors' models) and pictures are left out.
def _crossed(text: str, *values) -> list[str]:
    return [text.format(*each) for each in itertools.product(*values)]


STARTS = (
    "--initialization kaiming_uniform --initialization_options value_init=default",
    "--initialization trunc_normal --initialization_options value_init=default",
    "--initialization mimetic --initialization_options value_init=mimetic",
    "",
    "--initialization_options solver=adam,value_init=default,kernel_size=5",
)
HEADS = "--config_overrides num_hidden_layers=8,hidden_size={},num_attention_heads={} {}"
ROWS = {
    "Gao et al. 2024, table 2": [
        *("augreg-base-49-224", "augreg-base-80-224", "augreg-base-80-320"),
        *("augreg-large-49-224", "augreg-large-80-224", "augreg-large-80-320"),
        *("augreg-large-49-384", "augreg-large-144-384", "augreg-large-196-384"),
    ],
    "Gao et al. 2024, table 3": [
        "augreg-base-49-224",
        "augreg-base-49-224 --label-loss-weight 1",
        "augreg-base-49-224 --no-inherit-blocks",
        "augreg-base-49-224 --loss kl --temperature 3",
        "augreg-base-49-224 --loss kl --temperature 5",
        "sparseformer-base-scratch",
    ],
    "Gao et al. 2024, table 4": [
        *("augreg-base-80-224", "augreg-base-80-320", "augreg-base-100-320"),
        *("augreg-large-80-224", "augreg-large-80-320", "augreg-large-100-320", "augreg-large-196-384"),
    ],
    "Gao et al. 2024, table 5": ["segment-augreg-base", "segment-augreg-large"],
    "Gao et al. 2024, table 6": [
        *("clip-base-49-224", "clip-large-64-224", "clip-large-128-224", "clip-large-144-336"),
    ],
    "Gao et al. 2024, table 7": ["scienceqa-clip-large-64-224", "scienceqa-clip-large-128-224"],
    "Gao et al. 2024, table 1 of the supplement": [
        *("augreg-base-49-224", "augreg-base-49-224 --tune 0", "augreg-base-49-224 --tune-all"),
        "augreg-base-49-224-untruncated",
        *("augreg-large-49-224", "augreg-large-49-224 --tune 0", "augreg-large-49-224 --tune-all"),
        *("augreg-large-49-224-untruncated", "augreg-large-49-224-untruncated --tune 16"),
    ],
    "Gao et al. 2024, SparseFormer": ["sparseformer-v1-tiny", "sparseformer-v1-small", "sparseformer-v1-base"],
    "Zheng et al. 2024, table 1": _crossed(
        "impulse-cifar10 --initialization default --config_overrides position_embedding={},pooling={}",
        ("learned", "sincos"),
        ("cls", "mean"),
    ),
    "Zheng et al. 2024, table 2": _crossed("impulse-{} {}", ("cifar10", "cifar100", "svhn", "tiny"), STARTS),
    "Zheng et al. 2024, table 3": _crossed(
        "impulse-cifar100 --config_overrides hidden_size={},num_attention_heads={} {}", (192,), (3, 8), STARTS
    )
    + _crossed(
        "impulse-cifar100 --config_overrides hidden_size={},num_attention_heads={} {}", (384,), (6, 16), STARTS
    ),
    "Zheng et al. 2024, table 4": _crossed(
        "convmixer --config_overrides hidden_size={},kernel_size={},spatial_filters={}",
        (256, 512),
        (3, 5, 8),
        ("trained", "random", "impulse", "box"),
    ),
    "Zheng et al. 2024, tables 5 and 7": _crossed(
        f"impulse-cifar10 {HEADS}", (64, 128, 256, 512), (4, 8, 16, 32), STARTS
    ),
    "Zheng et al. 2024, table 6": _crossed(
        'impulse-cifar10 --initialization_options pseudo_input=["{}","{}"],per_layer={}',
        ("pe", "uniform", "pe+uniform"),
        ("pe", "uniform", "pe+uniform"),
        ("true", "false"),
    ),
    "Zhang et al. 2022, figure 1 of the supplement": _crossed(
        "{}-{} --without-hint-at {}", ("joint", "shared"), ("small", "base"), (0.25, 0.5, 0.75, 1)
    ),
    "Zhang et al. 2022, tables 1 and 2 of the supplement": [
        *("joint-small", "joint-base", "shared-small", "shared-base"),
        *_crossed("{0}-{1} --variant {0}-{1}-res", ("joint", "shared"), ("small", "base")),
        *("agent-small", "agent-base", "agent-small-res", "agent-base-res", "alone-small", "alone-base"),
        *_crossed("alone-{} --optimizer sam --sam-rho 0.1 --max-grad-norm 0", ("small", "base")),
    ],
    "Hyeon-Woo et al. 2023, tables S1 and S2": _crossed(
        "context-broadcast-{} --config_overrides context_broadcast={},use_distillation_token=true",
        ("small", "base"),
        ("null", "cb", "cb_s"),
    )
    + ["context-broadcast-small --config_overrides hidden_size=192,num_attention_heads=3"],
    # LocalViT: `benchmarks/context_broadcast_tables.py local_vit --paper-recipe`.
    "Hyeon-Woo et al. 2023, table S3": [
        *("context-broadcast-pvt-small", "context-broadcast-pvt-v2-b1", "context-broadcast-swin-tiny"),
    ],
    "Hyeon-Woo et al. 2023, table S4": [
        "context-broadcast-cifar100",
        "context-broadcast-cifar100 --config_overrides context_broadcast=null",
    ],
    "Hyeon-Woo et al. 2023, tables S5 and S6": _crossed(
        "context-broadcast-small --config_overrides context_broadcast={},context_broadcast_position={}",
        ("cb", "cb_gate", "cb_hybrid"),
        ('["mlp_front"]', '["mlp_mid"]', '["mlp_end"]', '["attention_end"]', '["mlp_end","attention_end"]'),
    ),
}
# Files for models that no paper has.
OF_NO_PAPER = {"dinov2-small", "dinov2-base", "dinov2-large", "dinov3-small", "dinov3-base", "siglip2-base"}


@pytest.mark.parametrize("table", ROWS)
def test_each_row_of_the_papers_has_a_file(table):
    """The row's options are options of the command, and the file's comment names them."""
    commands = [(BOOTSTRAP, bootstrap), (TRAIN, train), (JOINT, joint)]
    for row in ROWS[table]:
        name, *options = row.split()
        if name in SEGMENT:
            assert not options
            continue
        [(files, recipe)] = [command for command in commands if name in command[0]]
        parsed = recipe.parse(["--config", name, "--output", "out", *options])
        text = f"{read(files[name])[1]} {files[name].read_text(encoding='utf-8')}".replace("_", "-")
        for option in options:
            for word in re.findall(r"^--[\w-]+|\w+(?==)", option):
                assert word.replace("_", "-").removeprefix("--") in text, (row, word)
        if files is TRAIN:
            parse_overrides(parsed[0].model_type, parsed[0].config_overrides)


def test_no_file_is_in_no_table():
    named = {row.split()[0] for rows in ROWS.values() for row in rows}
    assert named | OF_NO_PAPER == {*BOOTSTRAP, *SEGMENT, *TRAIN, *JOINT} and not named & OF_NO_PAPER


# Classes of the data sets that models are trained on from scratch.
CLASSES = {"ILSVRC/imagenet-1k": 1000, "uoft-cs/cifar100": 100, "uoft-cs/cifar10": 10, "ufldl-stanford/svhn": 10}


def of_train(values: dict):
    """The model of a recipe for `frugalvit train` or `joint`, and the pixels that it sees."""
    classes = CLASSES[values["dataset"]]
    if "variant" in values:
        config = BootstrappedViTConfig.from_variant(values["variant"], num_labels=classes)
        return BootstrappedViTForImageClassification(config), config.image_size
    overrides = parse_overrides(values["model_type"], values["config_overrides"])
    config = transformers.AutoConfig.for_model(values["model_type"], num_labels=classes, **overrides)
    return transformers.AutoModelForImageClassification.from_config(config), config.image_size


def in_full(name: str):
    """The student of a recipe at its true size, without numbers in it, and the pixels that it sees."""
    if name in TRAIN or name in JOINT:
        return of_train(read((TRAIN | JOINT)[name])[0])
    if name in SEGMENT:
        values, _ = read(SEGMENT[name])
        fields = {"num_latent_tokens": values["num_latent_tokens"], "num_labels": values["num_labels"]}
        return SparseFormerForSemanticSegmentation(SparseFormerConfig.from_variant(values["model"], **fields)), 512
    values, _ = read(BOOTSTRAP[name])
    first = values
    while "student" in first:
        earlier, _ = read(BOOTSTRAP[first["student"]])
        values, first = earlier | values, earlier
    anatomy = read_anatomy(TEACHERS[values["teacher"]](small=False))
    student_class = SparseFormerVisionModel
    if anatomy.classifier is not None or anatomy.projection is not None:
        projects = anatomy.classifier is None
        student_class = SparseFormerVisionModelWithProjection if projects else SparseFormerForImageClassification
    options = {"num_latent_tokens": values["num_latent_tokens"], "truncate": values["truncate"], "check": False}
    # DINOv2 is made for 518 pixels and used with 224.
    pixels = values.get("image_size") or (224 if "dinov2" in name else anatomy.image_size[0])
    return student_class.from_teacher(anatomy, **options), pixels


@pytest.mark.parametrize("name", [*BOOTSTRAP, *SEGMENT, *TRAIN, *JOINT])
def test_costs(name):
    """The costs in the comments are those that are counted, and, but for the head of segmentation, within a percent of
    the paper's."""
    _, comment = read((BOOTSTRAP | SEGMENT | TRAIN | JOINT)[name])
    counted = re.search(r"Counted: ([\d,]+) parameters(?:, ([\d.]+) G multiply)?", comment)
    parameters, billions = counted.groups()
    with torch.device("meta"), fx_config.patch(meta_nonzero_assume_all_nonzero=True):
        student, pixels = in_full(name)
        # A pair stands apart after training.
        macs = count_macs(student, pixels).macs_with_attention if billions else 0
    assert parameters == f"{student.num_parameters():,}"
    assert billions == (f"{macs / 1e9:.3f}" if name not in JOINT else None)
    if name in BOOTSTRAP and (printed := re.search(r"([\d.]+)G FLOPs", comment)):
        assert float(printed[1]) == pytest.approx(macs / 1e9, rel=0.01)
    if name in BOOTSTRAP and (printed := re.search(r"(\d+)M parameters", comment)):
        assert float(printed[1]) == pytest.approx(student.num_parameters() / 1e6, rel=0.01)


def test_names_that_are_none_and_files_of_that_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["--teacher", "t", "--config"]
    with pytest.raises(SystemExit):
        bootstrap.parse([*argv, "augreg-bas-49-224"])
    assert "is no file and no recipe; did you mean augreg-base-49-224, " in capsys.readouterr().err
    # A run's folder has the recipe's name; a file has what it says.
    (tmp_path / "dinov2-base").mkdir()
    (tmp_path / "dinov2-small").write_text("output_dir: mine")
    for size, folder in (("base", "dinov2-base"), ("small", "mine")):
        *_, run = bootstrap.parse([*argv, f"dinov2-{size}"])
        assert run.output_dir == folder
