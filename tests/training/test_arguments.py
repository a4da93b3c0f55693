"""Arguments of training commands, on the command line and in files: what cannot be ends with one clear line."""

import pytest

from frugalvit import cli
from frugalvit.training.components.arguments import ArgumentParser, RunArguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --learning-rate -1", "--learning-rate is -1.0, expected a positive number"),
        ("train --learning-rates 1", "there is no option --learning-rates; did you mean --learning-rate?"),
        ("train --epochs many", "invalid int value: 'many'"),
        ("train --epochs 0", "--epochs is 0, expected 1 or more"),
        ("train --num-workers -1", "--num-workers is -1, expected 0 or more"),
        ("train --flip 1.5", "--flip is 1.5, expected a number from 0 to 1"),
        ("train --randaugment-magnitude 31", "--randaugment-magnitude is 31, expected 0 to 30"),
        ("train --mixup inf", "--mixup is inf, expected 0 or more"),
        ("train --crop-scale 0.5", "expected two positive numbers, lower first"),
        ("train --weight-decay nan", "--weight-decay is nan"),
        ("train --layer-decay 0", "--layer-decay is 0.0, expected a number above 0, up to 1"),
        ("train --head-multiplier -1", "--head-multiplier is -1.0, expected 0 or more"),
        ("train --image-size 0", "--image-size is 0, expected 1 or more"),
        ("train --mixed-precision int8", "invalid choice: 'int8'"),
        ("train --config augreg-base-49-224", "augreg-base-49-224 is for frugalvit bootstrap"),
        ("train --config no.yaml", "No such file or directory: 'no.yaml'"),
        ("bootstrap --teacher t --truncate 1.5", "--truncate is 1.5"),
        ("bootstrap --teacher t --temperature 0", "--temperature is 0.0"),
        ("bootstrap --teacher t --elastic-token-counts 4 4", "counts is [4], expected two or more counts"),
        ("bootstrap --teacher t --elastic-token-counts 4 9 --num-latent-tokens 5", "is 5, expected --elastic-token-c"),
        ("bootstrap --teacher t --placement content", "--placement is 'content', expected grid without"),
        ("joint --without-hint-at 0", "--without-hint-at is 0.0, expected numbers above 0, to 1"),
        ("joint --crop-size 0", "--crop-size is 0, expected 1 or more"),
        ("joint --sam-rho -1", "--sam-rho is -1.0, expected 0 or more"),
        ("joint --max-grad-norm -1", "--max-grad-norm is -1.0, expected 0 or more"),
        ("joint --adam-epsilon 0", "--adam-epsilon is 0.0, expected a positive number"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments.split(), "--output", "out"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert error.startswith(f"frugalvit {arguments.split()[0]}: error: ") and message in error


@pytest.mark.parametrize(("written", "precision"), [("no", "no"), ('"no"', "no"), ("bf16", "bf16")])
def test_files_of_arguments(written, precision, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "arguments.yaml"
    file.write_text(f"mixed_precision: {written}\noutput_dir: ~/runs/first\ncompile: true\noverwrite: false\n")
    (run,) = ArgumentParser([RunArguments], "frugalvit train", "").parse(["--config", str(file)])
    assert (run.mixed_precision, run.output_dir) == (precision, f"{tmp_path}/runs/first")
    assert run.compile and not run.overwrite
