"""Test that the command line, YAML files and Python give the same arguments, and that errors are one line."""

import pytest
from trainings import command_words, values_of

from frugalvit import BootstrapArguments, bootstrap, cli
from frugalvit.training.arguments import DataArguments, read_values
from frugalvit.training.bootstrap import StudentArguments, make_parser


GIVEN = {"output_dir": "out", "teacher": "t", "num_tokens": [4, 9], "token_layers": [2], "dataset": ["a b", "c"]}
GIVEN |= {"truncate": 0.5, "break_ties": False, "learning_rate": 1e-3, "num_train_epochs": 1.5, "max_steps": 7}
GIVEN |= {"tune_all": True, "lr_scheduler_type": "linear", "crop_scale": [0.5, 1.0], "class_names": ["no", "1"]}
YAML = """{command: bootstrap, output_dir: out, teacher: t, num_tokens: [4, 9], token_layers: 2, dataset: [a b, c],
truncate: 0.5, break_ties: false, learning_rate: 1e-3, num_train_epochs: "1.5", max_steps: 7, tune_all: yes,
lr_scheduler_type: linear, crop_scale: [0.5, 1], class_names: ["no", 1], student: null, dense_layers: null}"""


def test_command_line_yaml_and_python_give_the_same(tmp_path):
    (tmp_path / "arguments.yaml").write_text(YAML)
    groups, config = make_parser().parse(command_words(**GIVEN)), ["--config", str(tmp_path / "arguments.yaml")]
    assert (groups[0].num_tokens, groups[1].dataset, groups[2].learning_rate) == ([4, 9], ["a b", "c"], 1e-3)
    assert (groups[0].break_ties, groups[2].tune_all, groups[1].class_names) == (False, True, ["no", "1"])
    dashes = command_words(**{name.replace("_", "-"): value for name, value in GIVEN.items()})
    others = [make_parser().parse(dashes), make_parser().parse(config), make_parser().parse_dict(GIVEN)]
    kinds = zip((StudentArguments, DataArguments, BootstrapArguments), groups, strict=True)
    others.append([kind(**{name: GIVEN[name] for name in GIVEN if name in vars(group)}) for kind, group in kinds])
    for other in others:
        assert values_of(other) == values_of(groups)
    # The command line takes precedence over the YAML file.
    over = make_parser().parse([*config, "--max_steps", "8", "--crop_scale", "0.2", "1", "--tune_all", "false"])
    assert (over[2].max_steps, over[2].crop_scale, over[2].tune_all) == (8, [0.2, 1.0], False)
    (tmp_path / "more.yaml").write_text("{teacher: t, output_dir: o, lr_scheduler_kwargs: {min_lr: 1.0e-5}}")
    more = make_parser().parse(["--config", str(tmp_path / "more.yaml")])
    assert more[2].lr_scheduler_kwargs == {"min_lr": 1e-5}
    recipe = make_parser().parse(["--config", "augreg-base-49-224", "--output_dir", "out"])
    assert (recipe[0].num_tokens, recipe[0].truncate, recipe[2].learning_rate) == ([48], 4, 2e-4)


@pytest.mark.parametrize(
    "case",
    [
        "bootstrap --teacher o/t --learning_rates 1 | no argument --learning_rates; did you mean --learning_rate?",
        "bootstrap --teacher o/t --learning_rate 1 2 | unexpected value '2': no option takes it",
        "bootstrap --teacher o/t --views_per_image 0 | views_per_image is 0, expected 1 or more",
        "bootstrap --teacher o/t --crop_scale 1 | crop_scale is [1.0], expected two positive numbers, the lower first",
        "bootstrap --config siglip-base | --config is siglip-base, expected a YAML file or a recipe; did you mean sig",
        "- a | --config file.yaml holds a list, expected names and values",
        "loss: l2 | invalid choice: 'l2'",
    ],
)
def test_wrong_arguments_are_one_line(case, tmp_path, monkeypatch, capsys):
    """The wrong argument is on the command line or in a YAML file. In both cases, the error is raised before a model
    or data set is loaded."""
    given, message = case.split(" | ")
    in_a_file = ["bootstrap", "--teacher", "owner/vit", "--config", "file.yaml"]
    words = given.split() if given.startswith("bootstrap") else in_a_file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text(given)
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--output_dir", "out"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert error.startswith(f"frugalvit {words[0]}: error: ") and message in error


def test_python_names_the_field_and_texts_hold_values(tmp_path):
    for options, message in (({"loss": "l2"}, "^loss is 'l2', expected one of"), ({"epochs": 3}, "HfArgumentParser")):
        with pytest.raises(ValueError, match=message):
            bootstrap("t", "images", output=tmp_path / "out", **options)
    values = {"hidden_act": "gelu", "out": [0, 1], "depths": "2,3", "name": "a=b", "flag": True}
    assert read_values("overrides", "hidden_act=gelu,out=[0,1],depths=2,3,name=a=b,flag=true") == values
    with pytest.raises(ValueError, match="overrides is 'a', expected name=value pairs with commas between"):
        read_values("overrides", "a")
