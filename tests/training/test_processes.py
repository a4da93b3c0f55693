"""Several processes do what one does, and end together."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import AutoModelForImageClassification

from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.training import train


CONFIGURATIONS = {path.stem: path for path in Path(train.__file__).with_name("launch").glob("*.yaml")}
VIT = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=3,num_attention_heads=2,intermediate_size=64"
# Images to train on that make no whole batch at the end, and images to evaluate on that have no even shares.
SHARED = {"train_split": "train[:72]", "eval_split": "test[:51]", "eval_batch_size": 16, "epochs": 2, "batch_size": 16}
SHARED |= {"warmup_epochs": 1, "logging_steps": 1, "checkpointing_steps": 3, "mixed_precision": "no"}
CLASSIFIER = {"config_overrides": VIT, "mixup": 0.8, "cutmix": 1}
PARTS = {"gradient_accumulation_steps": 2}
# It draws random numbers in the model, too.
KILLED = {"processes": 1, "options": {"config_overrides": f"{VIT},hidden_dropout_prob=0.1", "epochs": 3}}
KILLED["options"] |= {"train_split": "train[:64]", "logging_steps": 2, "mixup": 0, "cutmix": 0}
TIMES = {"images_per_second", "seconds"}


# They start many processes, for which a busy machine takes long.
pytestmark = pytest.mark.timeout(600)


def fsdp() -> dict[str, str]:
    """The environment that `accelerate launch --config_file fsdp2.yaml` gives its processes."""
    config = yaml.safe_load(CONFIGURATIONS["fsdp2"].read_text(encoding="utf-8"))
    values = {name.upper(): value for name, value in config["fsdp_config"].items()}
    values["FSDP_TRANSFORMER_CLS_TO_WRAP"] = values.pop("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP")
    options = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return options | {"ACCELERATE_USE_FSDP": "true"}


def as_arguments(values: dict) -> list[str]:
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return [str(text) for name, value in lists.items() for text in (f"--{name}", *value)]


def run(folder: Path, jobs: list[dict]):
    """Run jobs of several_processes.py; their `options` are the command line's, besides those of all."""
    for job in jobs:
        job["log"] = str(folder / f"{job['name']}.log")
        job.setdefault("ends", [1 if "stops" in job else 0] * job["processes"])
        if "arguments" in job:
            continue
        values = SHARED | {"output_dir": folder / job["name"]} | job["options"]
        job["arguments"] = as_arguments(values)
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    program = Path(__file__).with_name("several_processes.py")
    process = subprocess.run(
        [sys.executable, program, folder / "jobs.json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert process.returncode == 0, process.stderr[-5000:]


def log(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "images_per_second"} for record in records]


def assert_same_run(folder: Path, expected: Path):
    assert len(log(folder)) == len(log(expected)) == 2 * 4 + 2
    for ours, theirs in zip(log(folder), log(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert (folder / "config.json").read_text() == (expected / "config.json").read_text()
    models = [AutoModelForImageClassification.from_pretrained(path).state_dict() for path in (folder, expected)]
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all runs, with images to stream."""
    folder = tmp_path_factory.mktemp("runs")
    for name, images in (("train", 25), ("eval", 21)):
        load_images(SUBSET, f"train[:{images}]").to_parquet(folder / f"{name}.parquet")
    return folder


def classifiers(jobs: list[dict]) -> list[dict]:
    return [{"module": "training.train", **job, "options": CLASSIFIER | job.get("options", {})} for job in jobs]


def students(jobs: list[dict], teacher: Path) -> list[dict]:
    small = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"
    student = {"teacher": teacher, "config_overrides": small, "learning_rate": 1e-3, "recipe": "paper"}
    student["elastic_token_counts"] = ["1", "2", "3", "4", "5"]
    return [{"module": "training.bootstrap", **job, "options": student | job.get("options", {})} for job in jobs]


@pytest.fixture(scope="module")
def finished(folder, teacher):
    """One program imports for all runs."""
    stream = {"dataset": folder / "train.parquet", "eval_dataset": folder / "eval.parquet", "eval_split": "train"}
    stream |= {"train_split": "train", "streaming": True, "steps_per_epoch": 4, "shuffle_buffer": 20}
    sharded = {"name": "sharded", "processes": 2, "options": stream | PARTS, "environment": fsdp()}
    raised = {"name": "raised", "processes": 2, "fails": "worker raises", "ends": [1, 1]}
    # The processes agree on a precision.
    raised["options"] = {"num_workers": 1, "mixed_precision": "auto"}
    # They end in the second epoch, after a checkpoint within it, and go on.
    jobs = classifiers(
        [{"name": "stream", "processes": 1, "options": stream}, {**sharded, "stops": 7}, sharded, raised]
    )
    # One is never interrupted, one killed three times.
    killed = [{"killed": where, "ends": [-9]} for where in ("best model", "epoch", "checkpoint")]
    jobs += classifiers([{"name": "whole"} | KILLED, *({"name": "killed"} | KILLED | each for each in [*killed, {}])])
    jobs += students(
        [
            # The other one is compared with its teacher at the end.
            {"name": "student-one", "processes": 1, "options": {"compare": False}},
            {"name": "student-two", "processes": 2, "options": PARTS},
        ],
        teacher,
    )
    run(folder, jobs)
    return folder


@pytest.fixture(scope="module")
def more_finished(finished, folder, teacher):
    """More runs, beside these."""
    # Four shards of 12 images, each with a label of its own.
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=48)})
    numbered = load_images(SUBSET, "train[:48]").remove_columns("label").add_column("label", range(48)).cast(features)
    for shard in range(4):
        numbered.shard(4, shard, contiguous=True).to_parquet(folder / f"shard-{shard}.parquet")
    shards = {"dataset": folder / "shard-*.parquet", "eval_dataset": folder / "shard-*.parquet"}
    shards |= {
        "train_split": "train",
        "eval_split": "train",
        "streaming": True,
        "steps_per_epoch": 6,
        "batch_size": 8,
        "shuffle_buffer": 5,
    }
    jobs = [
        {"name": "one", "processes": 1},
        {"name": "four", "processes": 4, "options": PARTS},
        # Two begin, one goes on.
        {"name": "fewer", "processes": 2, "stops": 5},
        {"name": "fewer", "processes": 1},
        {"name": "shards", "processes": 2, "options": shards, "listed": True},
        {"name": "shards-again", "processes": 2, "options": shards, "listed": True, "stops": 10},
        {"name": "shards-again", "processes": 2, "options": shards | {"num_workers": 1}, "listed": True},
        {"name": "one-killed", "processes": 2, "fails": "killed", "ends": [1, -9]},
        {"name": "lost", "processes": 2, "fails": "worker killed", "ends": [1, 1], "options": {"num_workers": 1}},
    ]
    blocks = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "PreNormLayer"}
    sharded = {"name": "student-sharded", "processes": 2, "environment": fsdp() | blocks}
    run(folder, classifiers(jobs) + students([sharded], teacher))
    return folder


def processes_of(folder: Path) -> int:
    return json.loads((folder / "results.json").read_text())["processes"]


def test_a_classifier(finished):
    """Two processes that accumulate, share out its weights and go on within a stream."""
    checkpoint = finished / "sharded" / "checkpoints" / "step-00000006"
    assert (checkpoint / "pytorch_model_fsdp_0" / "__1_0.distcp").is_file()
    assert_same_run(finished / "sharded", finished / "stream")
    assert processes_of(finished / "sharded") == 2


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def read(path: Path) -> dict:
    return without_times(json.loads(path.read_text(encoding="utf-8")))


def test_killed_runs_resume_bit_exactly(finished):
    """SIGKILL in the middle of an epoch, of writing a checkpoint and of writing the best model."""
    whole, killed = finished / "whole", finished / "killed"
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["step-00000009", "step-00000012"]
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == names
    for name in names:
        ours, theirs = killed / "checkpoints" / name, whole / "checkpoints" / name
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        assert read(ours / "state.json") == read(theirs / "state.json")
        for file in ("optimizer.pt", "scheduler.pt"):
            torch.testing.assert_close(torch.load(ours / file), torch.load(theirs / file), rtol=0, atol=0)
        random = [torch.load(folder / "rng_state.pth", weights_only=False) for folder in (ours, theirs)]
        assert torch.equal(*(states["cpu"] for states in random))
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    results = [read(folder / "results.json") for folder in (killed, whole)]
    assert results[0]["epochs"] == results[1]["epochs"] and results[0]["best"] == results[1]["best"]
    logs = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (killed, whole)]
    logs = [[without_times(json.loads(line)) for line in log] for log in logs]
    assert logs[0] == logs[1] and len(logs[0]) == 3 + 6
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.nightly
def test_a_classifier_of_four_processes(more_finished):
    assert_same_run(more_finished / "four", more_finished / "one")
    assert processes_of(more_finished / "four") == 4


@pytest.mark.nightly
def test_a_run_of_two_processes_is_gone_on_with_by_one(more_finished):
    """The run goes on as it would have with two processes; the model draws nothing at random."""
    assert_same_run(more_finished / "fewer", more_finished / "one")
    assert processes_of(more_finished / "fewer") == 1


@pytest.mark.nightly
def test_each_reads_its_own_shards(more_finished):
    """Every image once an epoch, none twice; and what goes on within an epoch sees what it would have seen."""
    finished = more_finished

    def listed(name: str, rank: int) -> list[list[int]]:
        lines = (finished / f"{name}.log.{rank}.batches").read_text().splitlines()
        return [[int(number) for number in line.split()] for line in lines]

    epochs = []
    for epoch in range(2):
        seen = [
            [label for number, *labels in listed("shards", rank) if number == epoch for label in labels]
            for rank in (0, 1)
        ]
        assert sorted(seen[0] + seen[1]) == list(range(48))
        files = [{label // 12 for label in labels} for labels in seen]
        assert len(files[0]) == len(files[1]) == 2 and not files[0] & files[1]
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    for rank in (0, 1):
        whole, again = listed("shards", rank), listed("shards-again", rank)
        # It stopped in the 11th step, after the checkpoint of the 9th.
        assert len(whole) == 12 and len(again) == 11 + 3
        assert again[:11] == whole[:11] and again[11:] == whole[9:]
    assert log(finished / "shards-again") == log(finished / "shards")


def test_a_bootstrapped_student(finished):
    """Two processes that accumulate."""
    assert_same_run(finished / "student-two", finished / "student-one")


@pytest.mark.nightly
def test_a_student_whose_weights_are_shared_out(more_finished):
    assert_same_run(more_finished / "student-sharded", more_finished / "student-one")


def said(file: Path, message: str):
    error = file.read_text()
    assert "Traceback" not in error
    assert re.search(rf"^frugalvit train: error: {message}$", error, re.MULTILINE), error


def test_processes_end_together_and_say_why(finished):
    """One whose DataLoader fails in a process ends the other."""
    said(finished / "raised.log.1", r"Really not\.")


@pytest.mark.nightly
def test_lost_processes_end_together_and_say_why(more_finished):
    """One that is killed, and one whose DataLoader loses a process, ends the other."""
    said(
        more_finished / "lost.log.1",
        r"A process that decodes images died: DataLoader worker .* Then lower --num-workers\.",
    )


@pytest.mark.nightly
@pytest.mark.parametrize("module", ["train", "bootstrap"])
def test_deepspeed_has_the_losses_of_one_process_and_goes_on(module, teacher, tmp_path):
    pytest.importorskip("deepspeed")
    job = {"options": SHARED | {"eval_split": "test[:48]", "max_grad_norm": 0.5}}
    (job,) = classifiers([job]) if module == "train" else students([job], teacher)
    options = job["options"] | ({} if module == "train" else {"compare": False})
    recipe = f"frugalvit.training.{module}"
    two = ("torch.distributed.run", "--nproc-per-node", "2", Path(__file__).with_name("deepspeed_on_cpus.py"), recipe)
    stage = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "DS_ACCELERATOR": "cpu"}

    def train_by(name: str, *program, **environment: str) -> list[dict]:
        command = [sys.executable, "-m", *program, *as_arguments(options | {"output_dir": tmp_path / name})]
        subprocess.run(command, env=os.environ | environment, check=True, timeout=580)
        return log(tmp_path / name)

    expected = train_by("one", recipe)
    for _ in range(2):
        for ours, theirs in zip(train_by("two", *two, **stage), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        # As if it had been killed after its last checkpoint but one.
        newest = max((tmp_path / "two" / "checkpoints").glob("step-*"))
        assert list(newest.glob("global_step*"))
        shutil.rmtree(newest)


def test_processes_that_accelerate_does_not_see_are_refused(tmp_path, monkeypatch):
    """Each would train alone, in the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="2 processes .* Accelerate sees 1.*ACCELERATE_USE_CPU=true"):
        train.main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_accelerate_launch_takes_what_ships():
    assert CONFIGURATIONS.keys() == {"fsdp2", "deepspeed_zero2"}
    environments = {}
    for name, file in CONFIGURATIONS.items():
        arguments = launch_command_parser().parse_args(["--config_file", str(file), "-m", "frugalvit.training.train"])
        arguments, config, _ = _validate_launch_command(arguments)
        assert arguments.num_processes == 2 and not arguments.cpu
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
            environments[name] = prepare_deepspeed_cmd_env(arguments)[1]
        else:
            environments[name] = prepare_multi_gpu_env(arguments)
    assert fsdp().items() <= environments["fsdp2"].items()
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert deepspeed.items() <= environments["deepspeed_zero2"].items()
