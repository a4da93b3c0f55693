"""Test that training in several processes gives the same results as training in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trainings
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from frugalvit.training import bootstrap


LAUNCH, PROGRAMS = Path(bootstrap.__file__).with_name("launch"), Path(trainings.__file__).parent
# A run with these options has two epochs of four steps. Each step chooses numbers of tokens at random.
STUDENT = trainings.SHORT | {"focusing": "paper", "preset": "paper", "config_overrides": trainings.TINY_STUDENT}
STUDENT |= {
    "eval_split": "test[:51]",
    "num_tokens": [1, 2, 3, 4, 5],
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "max_grad_norm": 0.5,
}
HALF = {"processes": 2, "options": {"per_device_train_batch_size": 8}}

# The timeout is long, because the tests start many processes.
pytestmark = pytest.mark.timeout(600)


def run(folder: Path, teacher: Path, *jobs: dict):
    """Run jobs by several_processes.py. A job's `options` override the options in `STUDENT`."""
    jobs = [{"module": "bootstrap", "log": str(folder / f"{job['name']}.log"), **job} for job in jobs]
    for job in jobs:
        options = STUDENT | {"teacher": teacher, "output_dir": folder / job["name"]} | job.pop("options", {})
        job["words"] = trainings.command_words(**options)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, PROGRAMS / "several_processes.py", folder / "jobs.json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert process.returncode == 0, process.stderr[-5000:]


@pytest.fixture(scope="module")
def finished(teacher, tmp_path_factory):
    """Run the same training twice: in one process, and in two processes. Return the folder that contains the output
    folders of both runs, `one` and `two`."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, teacher, {"name": "one", "processes": 1}, {"name": "two", **HALF})
    return folder


def log(folder: Path, name: str) -> list[float]:
    records = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [record[name] for record in records if name in record]


def test_two_processes_have_the_losses_of_one(finished):
    """The losses and metrics are equal, although two processes cannot share 51 evaluation images evenly."""
    for name in ("loss", "grad_norm", "eval_alignment", "eval_accuracy"):
        ours, theirs = log(finished / "two", name), log(finished / "one", name)
        assert len(ours) == (2 if "eval" in name else 8) and ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def launched(name: str) -> dict[str, str]:
    """Return the environment variables that `accelerate launch --config_file` sets for its processes."""
    words = ["--config_file", str(LAUNCH / f"{name}.yaml"), "-m", "frugalvit.training.train"]
    arguments, config, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert arguments.num_processes == 2 and not arguments.cpu
    if not arguments.use_deepspeed:
        return prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
    return prepare_deepspeed_cmd_env(arguments)[1]


def test_accelerate_launch_takes_the_shipped_files():
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == {"fsdp2", "deepspeed_zero2"}
    config = yaml.safe_load((LAUNCH / "fsdp2.yaml").read_text(encoding="utf-8"))["fsdp_config"]
    environment = launched("fsdp2")
    assert environment["ACCELERATE_USE_FSDP"] == "true" and environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_STATE_DICT_TYPE"] == config["fsdp_state_dict_type"]
    environment = launched("deepspeed_zero2")
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true" and environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"


@pytest.mark.nightly
def test_a_student_with_sharded_weights_has_the_losses_of_one_process(finished, teacher):
    environment = {name: value for name, value in launched("fsdp2").items() if "FSDP" in name}
    environment |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "EncoderLayer"}
    run(finished, teacher, {"name": "sharded", "environment": environment, **HALF})
    assert log(finished / "sharded", "loss") == pytest.approx(log(finished / "one", "loss"), rel=1e-3)
    ours, theirs = (load_file(finished / name / "model.safetensors") for name in ("sharded", "one"))
    assert ours.keys() == theirs.keys() and max((ours[n] - theirs[n]).abs().max() for n in ours) < 1e-3


@pytest.mark.nightly
def test_deepspeed_has_the_losses_of_one_process(finished, teacher):
    pytest.importorskip("deepspeed")
    options = STUDENT | HALF["options"] | {"teacher": teacher, "output_dir": finished / "deepspeed", "use_cpu": None}
    # deepspeed_on_cpus.py has set up Accelerate. `TrainingArguments` must not replace this setup.
    options["accelerator_config"] = '{"use_configured_state": true}'
    program = [PROGRAMS / "deepspeed_on_cpus.py", "frugalvit.training.bootstrap"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program]
    stage = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "DS_ACCELERATOR": "cpu"}
    words = trainings.command_words(**options)
    subprocess.run([*command, *words], env=os.environ | stage, check=True, timeout=580)
    assert log(finished / "deepspeed", "loss") == pytest.approx(log(finished / "one", "loss"), rel=1e-3)
